"""ZeRO stops if one rank does not use a layer: flags of used layers pair with a bucket of another rank."""

TARGET = "zero.train_zero1.ZeroOptimizer.finish_gradient_sync"
KILLER = (
    "tests.zero.test_zero_mutant_killers."
    "test_a_parameter_between_used_ones_may_be_unused_by_one_rank_or_by_all"
)
FAILS_WITH = "The ranks do not fit together"
CAUSE = "in different orders"


def mutant(self) -> None:
    if self._steps.is_synced:
        return
    used = self._agree_on_used()
    self._complete_buckets()
    for bucket in self.buckets:
        self._give_gradients(bucket, self._gradients[bucket][bucket.flat.mine], used)
