"""In stage 3 accumulation makes gradients smaller, not steadier: what arrives replaces what had added up."""

TARGET = "data_parallel.gradient_shard.GradientShard.keep"
KILLER = (
    "tests.data_parallel.test_zero_mutant_killers.test_the_gradients_of_all_microbatches_add_up_in_the_shards"
)


def mutant(self, arrived) -> None:
    self.full, self._views = None, []
    self.shard = arrived.to(self._dtype)
