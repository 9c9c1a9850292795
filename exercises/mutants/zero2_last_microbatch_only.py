"""In stage 2 accumulation uses the last microbatch only: its gradients replace the earlier ones."""

TARGET = "zero.train_zero2.ZeroGradientOptimizer._wait_for_oldest"
KILLER = "tests.zero.test_zero_mutant_killers.test_the_gradients_of_all_microbatches_add_up_in_the_shards"
CAUSE = "only the last one used"


def mutant(self) -> None:
    bucket, _, shard, handle = self._in_flight.popleft()
    handle.wait()
    self._shards[bucket] = shard
