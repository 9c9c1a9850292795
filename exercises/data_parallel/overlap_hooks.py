"""All-reduces in the backward. Write `OverlapDataParallel._launch` and
`OverlapDataParallel.finish_gradient_sync` of data_parallel/train_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_overlap.py yet: it has
the solution.

You may use:

    all_reduce(tensor, op='sum', group=None, async_op=False, pattern=None) -> Work
        Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank.
    self.pattern: str | None
        The pattern of the collective.

Check it with `python -m exercises check overlap_hooks`.
"""

import torch
from torch import nn

from comm.collectives import all_reduce
from lab.trace.timeline import span


def _launch(self, parameter: nn.Parameter) -> None:
    """Start to average the gradient of a parameter, and return while it travels.

    A hook calls this in the backward when the gradient is complete, and finish_gradient_sync for a
    parameter that this rank did not use: then it contributes zeros. Append the handle of the
    all-reduce to the list `self._in_flight`. When the message has arrived, the gradient must be the
    mean over the ranks of `self.group`. `span` only notes the launch in a trace; you may leave it
    out.
    """
    raise NotImplementedError("`OverlapDataParallel._launch` is not written yet.")


def finish_gradient_sync(self) -> None:
    """Start the all-reduces that no hook has started, and wait for all of them.

    `self._to_launch` is a deque of the parameters that have not been launched, in the order of
    the launches. At the end call `self._expect_gradients()`, which prepares for the next
    backward.
    """
    raise NotImplementedError("`OverlapDataParallel.finish_gradient_sync` is not written yet.")
