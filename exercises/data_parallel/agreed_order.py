"""The order that rank 0 observed. Write `BucketOrder.adopt_observed` of data_parallel/bucket_order.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/bucket_order.py yet: it
contains the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    broadcast(tensor, root=0, group=None, async_op=False, pattern=None) -> Work
        Copy the root's `tensor` to every rank's.
    Group = dist.ProcessGroup | None
    self._numbers
        Positions in `parameters`.
    self._observed(seen: list[Tensor]) -> list[int]
        Return the positions of the parameters in `seen`, and then those of all others.
    self._parameters: list[nn.Parameter]
    self._seen: list[Tensor] | None
        None after the first step.
    self.was_sent

Check it with `python -m exercises check agreed_order`.
"""

import torch

from comm.collectives import Group, broadcast


def adopt_observed(self, group: Group) -> bool:
    """After the first step, adopt the order that rank 0 observed. Return whether the order changed.

    `self._seen` is the list of parameters in the order in which this rank's gradients came, and None
    after the first step. `self._observed(seen)` makes positions of it, and puts those that were not
    seen at the end. `self._numbers` is the order now, a list of positions. `self.was_sent` must be
    True if this call sends the order, else False.
    """
    raise NotImplementedError(
        "The order that rank 0 observed is not written yet: `BucketOrder.adopt_observed` has no body."
    )
