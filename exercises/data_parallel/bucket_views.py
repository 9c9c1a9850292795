"""Gradients that live in buckets. Write `Bucket.__init__` and `Bucket.move_in` of
data_parallel/train_bucket_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_bucket_overlap.py yet: it
contains the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    memory.zeros(numel: int, example: Tensor) -> Tensor
        Return a flat tensor of `numel` zeros, of the dtype and on the device of `example`.
    OWN_MEMORY = OwnMemory()
    self.flags
    self.flat
    self.missing: set[Tensor]
    self.views

Check it with `python -m exercises check bucket_views`.
"""

from torch import Tensor, nn

from data_parallel.bucket_memory import OWN_MEMORY, OwnMemory


def __init__(
    self, parameters: list[nn.Parameter], num_flags: int = 0, memory: OwnMemory = OWN_MEMORY
) -> None:
    """Make a flat tensor of zeros, with a place for each parameter's gradient and for flags.

    There are `num_flags` flags at the end. Set `self.flat`; `self.flags`, the view of the flags;
    `self.views`, a dict from each parameter to the view of its place, in its shape; and
    `self.missing`, a set of all parameters. Then move in the gradients that are there already.

    All parameters have one dtype and device. The flat tensor comes from `memory.zeros`, with the
    first parameter as example: `memory` is this rank's own, or memory that the ranks share.
    """
    raise NotImplementedError(
        "Gradients that live in buckets is not written yet: `Bucket.__init__` has no body."
    )


def move_in(self, parameter: Tensor) -> None:
    """Make the parameter's gradient the view of its place in this bucket, with the gradient's
    values.

    Do not copy a gradient that is that view already. If there is no gradient, fill the place with
    zeros.
    """
    raise NotImplementedError(
        "Gradients that live in buckets is not written yet: `Bucket.move_in` has no body."
    )
