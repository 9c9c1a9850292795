"""In stage 3 gradients are n times too large: clipping acts in most steps, and SGD steps are too long."""

from comm.collectives import reduce_scatter

TARGET = "zero.train_zero3.Unit.reduce_scatter"
KILLER = "tests.zero.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum"
CAUSE = "sum over ranks that should be a mean"
SYMPTOM = "In stage 3 clipping acts in most steps, and SGD steps are too long."


def mutant(self) -> None:
    full = self.gradients.full
    shard = full.new_empty(self.flat.shard_numel)
    handle = reduce_scatter(shard, full, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._reducing = shard, handle
