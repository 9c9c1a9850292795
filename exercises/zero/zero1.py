"""ZeRO 1: an n-th of the optimizer. Write `ZeroOptimizer._launch`, `ZeroOptimizer.step` and
`ZeroOptimizer.gather_parameters` of zero/train_zero1.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/train_zero1.py yet: it has the solution.

You may use:

    all_gather(full, shard, group=None, async_op=False, pattern=None) -> Work
        Write all shards, in rank order, to each rank's `full`.
    reduce_scatter(shard, full, op='sum', group=None, async_op=False, pattern=None) -> Work
        Write this rank's part of the reduction of all ranks' `full` to `shard`.
    work.wait()
        Block until the operation has ended.

Check it with `python -m exercises check zero1`.
"""

from comm.collectives import all_gather, reduce_scatter
from lab.trace.timeline import span
from zero.train_zero1 import Bucket


def _launch(self, bucket: Bucket) -> None:
    """Start the reduce-scatter of a complete bucket: this rank's part of it becomes the mean over
    ranks.

    `bucket.gradients` is the flat tensor of the bucket's gradients, and the slice
    `bucket.layout.mine` of it this rank's part. Use `self.group` and `self.pattern`, and append
    (bucket, handle) to `self._in_flight`: the backward must go on.
    """
    raise NotImplementedError("`ZeroOptimizer._launch` is not written yet.")


def step(self, closure: None = None) -> None:
    """Update this rank's shard of the parameters, and gather the shards of all ranks.

    First call `self._guard.before_step()`, which refuses wrong use. `self.inner` is an ordinary
    optimizer of this rank's shards.
    """
    raise NotImplementedError("`ZeroOptimizer.step` is not written yet.")


def gather_parameters(self) -> None:
    """Collect the shards of all ranks in `bucket.full`, for all of `self.buckets`, on every rank.

    The slice `bucket.layout.mine` of `bucket.full` is this rank's shard.
    """
    raise NotImplementedError("`ZeroOptimizer.gather_parameters` is not written yet.")
