"""In stage 2 AdamW's weight decay shrinks layers that no rank uses: zeros count as their gradients."""

TARGET = "zero.train_zero2.ZeroGradientOptimizer.finish_gradient_sync"
KILLER = "tests.zero.test_zero_mutant_killers.test_weight_decay_does_not_change_parameters_that_no_rank_used"
CAUSE = "Zeros stand where no gradient should be"


def mutant(self) -> None:
    self._complete_buckets()
    self._agree_on_used()
    every = {piece.parameter for piece in self.pieces}
    for bucket in self.buckets:
        self._give_gradients(bucket, self._shards[bucket], every)
