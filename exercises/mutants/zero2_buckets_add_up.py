"""On a slow link stage 2 needs as much memory as stage 1: buckets fill faster than they are sent."""

from comm.collectives import reduce_scatter
from data_parallel.flat import ParameterBucket

TARGET = "zero.train_zero2.ZeroGradientOptimizer._reduce_scatter"
KILLER = "tests.zero.test_zero_mutant_killers.test_at_most_three_buckets_of_gradients_are_alive"
CAUSE = "kept"


def mutant(self, bucket: ParameterBucket) -> None:
    full = self._filling.pop(bucket)
    shard = full.new_empty(bucket.flat.shard_numel)
    handle = reduce_scatter(shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, full, shard, handle))
