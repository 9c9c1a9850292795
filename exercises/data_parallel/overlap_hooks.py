"""All-reduces in the backward. Write `OverlapDataParallel._launch`, `OverlapDataParallel._wait_for_all` and
`OverlapDataParallel.finish_gradient_sync` of data_parallel/train_overlap.py.

Read notebooks/05_overlap_and_buckets.ipynb first. Do not open data_parallel/train_overlap.py yet: it
contains the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    all_reduce(tensor, op='sum', group=None, async_op=False, pattern=None) -> Work
        Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank.
    self._guard.synchronised() -> None
        Note that all gradients are the mean over ranks.
    self._guard: ReplicaGuard
    self._in_flight: list[tuple[Tensor, Work]]
    self._launcher.missing() -> list[int]
        Return the numbers that are not ready, in order.
    self._launcher.ready(i: int) -> None
        Mark number i as ready, and launch what can be launched.
    self._launcher.reset() -> None
        Make no number ready, and start with number 0 again.
    self._launcher: OrderedLauncher
    self._trained
    self.group: Group
    self.pattern: str | None
    span(name: str, kind: str = 'compute', **args: Any) -> AbstractContextManager[None]
        Record the time of a `with` block, also if it raises.
    work.wait() -> None
        Block until the operation has ended.

Check it with `python -m exercises check overlap_hooks`.
"""

import torch

from comm.collectives import all_reduce
from lab.trace.timeline import span


def _launch(self, i: int) -> None:
    """Start to all-reduce the gradient of `self._trained[i]`, and return while it travels.

    A hook calls this in the backward when the gradient is complete. Use `self.group` and
    `self.pattern`. `self._in_flight` is a list of pairs, of a gradient and the handle of its
    all-reduce: the hook compares the gradient later, to notice a second backward. When the message
    has arrived, the gradient must be the mean over ranks. `span` only notes the launch in a trace;
    you may leave it out.
    """
    raise NotImplementedError(
        "All-reduces in the backward is not written yet: `OverlapDataParallel._launch` has no body."
    )


def _wait_for_all(self) -> None:
    """Wait for all gradients in flight, and forget them.

    Then call `self._launcher.reset()`, which expects the gradients of the next backward.
    """
    raise NotImplementedError(
        "All-reduces in the backward is not written yet: `OverlapDataParallel._wait_for_all` has no body."
    )


def finish_gradient_sync(self) -> None:
    """Start the all-reduces that no hook has started, and wait for all of them.

    `self._launcher.missing()` returns the numbers of the parameters without a gradient of this
    backward. Such a parameter may still have a `.grad` of an earlier microbatch: keep it. Where a
    rank did not use a parameter, so that its `.grad` is None, the rank contributes zeros. A
    parameter that no rank used keeps `.grad` None.

    Call `self._launcher.ready(i)` for every missing number, also for one that no rank used: the
    numbers after it wait for it. Reduce the flags of which parameters are used after that. Before
    it, hooks of different ranks have started a different number of all-reduces, so the ranks
    would not pair the same calls. At the end call `self._guard.synchronised()`.
    """
    raise NotImplementedError(
        "All-reduces in the backward is not written yet: `OverlapDataParallel.finish_gradient_sync` has no "
        "body."
    )
