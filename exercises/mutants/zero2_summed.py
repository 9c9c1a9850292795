"""In stage 2 gradients are n times too large: clipping acts in most steps, and SGD steps are too long."""

from comm.collectives import reduce_scatter
from data_parallel.flat import ParameterBucket

TARGET = "zero.train_zero2.ZeroGradientOptimizer._reduce_scatter"
KILLER = "tests.zero.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum"
CAUSE = "sum over ranks that should be a mean"
SYMPTOM = "In stage 2 clipping acts in most steps, and SGD steps are too long."


def mutant(self, bucket: ParameterBucket) -> None:
    full = self._filling.pop(bucket)
    shard = full.new_empty(bucket.flat.shard_numel)
    handle = reduce_scatter(shard, full, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, full, shard, handle))
