"""In stage 1 with SGD the learning rate seems to grow with the number of ranks: shards hold sums."""

from comm.collectives import reduce_scatter
from data_parallel.flat import ParameterBucket

TARGET = "zero.train_zero1.ZeroOptimizer._reduce_scatter"
KILLER = "tests.zero.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum"
CAUSE = "sum over ranks that should be a mean"


def mutant(self, bucket: ParameterBucket) -> None:
    full = self._gradients[bucket]
    shard = full[bucket.flat.mine]
    handle = reduce_scatter(shard, full, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append(handle)
