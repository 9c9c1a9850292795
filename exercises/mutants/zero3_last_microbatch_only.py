"""In stage 3 accumulation uses the last microbatch only: its gradients replace the earlier ones."""

TARGET = "zero.gradient_shard.GradientShard.keep"
KILLER = "tests.zero.test_zero_mutant_killers.test_the_gradients_of_all_microbatches_add_up_in_the_shards"
CAUSE = "only the last one used"


def mutant(self, arrived) -> None:
    self.full, self._views = None, []
    self.shard = arrived.to(self._dtype)
