"""ZeRO 2: gradients freed as they leave. Write `ZeroGradientOptimizer._reduce_scatter`,
`ZeroGradientOptimizer._view` and `ZeroGradientOptimizer._wait_for_oldest` of zero/train_zero2.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/train_zero2.py yet: it contains the solution.
All that you need is in this file, in the notebook and in the hints.

You may use:

    bucket.flat.numel
    bucket.flat.padding
    bucket.flat.parameters: list[nn.Parameter]
    bucket.flat.shard_numel
    bucket.flat.views(full: Tensor) -> list[Tensor]
        Return each parameter's view of `full`, in the parameter's shape.
    bucket.flat: Flat
    bucket.full
    bucket.name: str
    MOST_IN_FLIGHT = 2
    reduce_scatter(shard, full, op='sum', group=None, async_op=False, pattern=None) -> Work
        Write this rank's part of the reduction of all ranks' `full` to `shard`.
    self._bucket: dict[Tensor, ParameterBucket]
        Of each parameter.
    self._filling: dict[ParameterBucket, Tensor]
        Buckets that miss a gradient.
    self._in_flight: deque[tuple[ParameterBucket, Tensor, Tensor, Work]]
    self._shards: dict[ParameterBucket, Tensor]
        Of the gradients: what this rank keeps.
    self._views: dict[Tensor, Tensor]
        The places of gradients that they miss.
    self.group: Group
    self.pattern: str | None
    span(name: str, kind: str = 'compute', **args: Any) -> AbstractContextManager[None]
        Record the time of a `with` block, also if it raises.
    work.wait() -> None
        Block until the operation has ended.

Check it with `python -m exercises check zero2`.
"""

import torch
from torch import Tensor

from comm.collectives import reduce_scatter
from data_parallel.flat import ParameterBucket
from lab.trace.timeline import span
from zero.train_zero2 import MOST_IN_FLIGHT


def _reduce_scatter(self, bucket: ParameterBucket) -> None:
    """Start to reduce-scatter a complete bucket, when fewer than MOST_IN_FLIGHT are in flight.

    `self._filling` has the flat tensor of each bucket that misses a gradient: take this bucket's out
    of it. The shard has `bucket.flat.shard_numel` numbers, in memory of its own. Append (bucket,
    full, shard, handle) to the deque `self._in_flight`.
    """
    raise NotImplementedError(
        "ZeRO 2: gradients freed as they leave is not written yet: `ZeroGradientOptimizer._reduce_scatter` "
        "has no body."
    )


def _view(self, parameter: Tensor) -> Tensor:
    """Return the parameter's place in its bucket, which gets memory with its first gradient.

    `self._bucket[parameter]` is its bucket, and `bucket.flat.views(full)` returns the views of
    all `bucket.flat.parameters` in a flat tensor that is like `bucket.full`. The last
    `bucket.flat.padding` numbers of it must be zero. Keep the tensor in `self._filling` and the
    views in `self._views`, each until it is used.
    """
    raise NotImplementedError(
        "ZeRO 2: gradients freed as they leave is not written yet: `ZeroGradientOptimizer._view` has no body."
    )


def _wait_for_oldest(self) -> None:
    """Wait for the oldest reduce-scatter, and add its shard to that of earlier microbatches.

    `self._shards[bucket]` is what this rank keeps of the bucket's gradients.
    """
    raise NotImplementedError(
        "ZeRO 2: gradients freed as they leave is not written yet: `ZeroGradientOptimizer._wait_for_oldest` "
        "has no body."
    )
