"""Stage 2 needs as much memory as stage 1: each shard is a view, which keeps its full bucket in memory."""

from comm.collectives import reduce_scatter
from data_parallel.flat import ParameterBucket

TARGET = "zero.train_zero2.ZeroGradientOptimizer._reduce_scatter"
KILLER = "tests.zero.test_zero_mutant_killers.test_stage_2_keeps_only_its_shard_of_the_gradient"
CAUSE = "kept"


def mutant(self, bucket: ParameterBucket) -> None:
    while len(self._in_flight) >= 2:
        self._wait_for_oldest()
    full = self._filling.pop(bucket)
    shard = full[bucket.flat.mine]
    handle = reduce_scatter(shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, full, shard, handle))
