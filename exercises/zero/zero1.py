"""ZeRO 1: an n-th of the optimizer. Write `ZeroOptimizer._reduce_scatter`, `ZeroOptimizer.step` and
`ZeroOptimizer.gather_parameters` of zero/train_zero1.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/train_zero1.py yet: it contains the solution.
All that you need is in this file, in the notebook and in the hints.

You may use:

    all_gather(full, shard, group=None, async_op=False, pattern=None) -> Work
        Write all shards, in rank order, to each rank's `full`.
    bucket.flat.mine
    bucket.flat: Flat
    bucket.full
    bucket.name: str
    bucket.shard
    reduce_scatter(shard, full, op='sum', group=None, async_op=False, pattern=None) -> Work
        Write this rank's part of the reduction of all ranks' `full` to `shard`.
    self._before_step() -> None
        Raise WorkbookError if there is no gradient to train with; remove the placeholders in the
        model.
    self._gradients: dict[ParameterBucket, Tensor]
        A flat tensor of gradients for each bucket.
    self._in_flight: list[Work]
    self._steps.is_synced
    self._steps: StepGuard
    self.buckets: list[ParameterBucket]
    self.finish_gradient_sync() -> None
        Give each piece its part of the mean gradient, after the last backward.
    self.group: Group
    self.inner: Optimizer | None
    self.pattern: str | None
    span(name: str, kind: str = 'compute', **args: Any) -> AbstractContextManager[None]
        Record the time of a `with` block, also if it raises.
    work.wait() -> None
        Block until the operation has ended.

Check it with `python -m exercises check zero1`.
"""

from collections.abc import Callable
from typing import Any

from comm.collectives import all_gather, reduce_scatter
from data_parallel.flat import ParameterBucket
from lab.trace.timeline import span


def _reduce_scatter(self, bucket: ParameterBucket) -> None:
    """Start the reduce-scatter of a complete bucket: this rank's shard becomes the mean over ranks.

    `self._gradients[bucket]` is the flat tensor of the bucket's gradients, and the slice
    `bucket.flat.mine` of it this rank's shard. Use `self.group` and `self.pattern`, and append the
    handle to `self._in_flight`: the backward must go on.
    """
    raise NotImplementedError(
        "ZeRO 1: an n-th of the optimizer is not written yet: `ZeroOptimizer._reduce_scatter` has no body."
    )


def step(self, closure: Callable[[], Any] | None = None) -> Any:
    """Update this rank's shard of the parameters, and gather the shards of all ranks.

    Return what `closure`, if there is one, returns: it computes the gradients. If not
    `self._steps.is_synced`, call `self.finish_gradient_sync()`. Then call `self._before_step()`,
    which refuses wrong use, and step with `self.inner`, an ordinary optimizer of this rank's
    shard.
    """
    raise NotImplementedError(
        "ZeRO 1: an n-th of the optimizer is not written yet: `ZeroOptimizer.step` has no body."
    )


def gather_parameters(self) -> None:
    """Collect the shards of all ranks in `bucket.full`, for all of `self.buckets`, on every rank.

    `bucket.shard` is this rank's part of `bucket.full`, in the same memory.
    """
    raise NotImplementedError(
        "ZeRO 1: an n-th of the optimizer is not written yet: `ZeroOptimizer.gather_parameters` has no body."
    )
