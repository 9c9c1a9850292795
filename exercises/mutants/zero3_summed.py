"""Stage 3 clips almost every step, and trains with SGD as if at n times the learning rate."""

from comm.collectives import reduce_scatter

TARGET = "data_parallel.gradient_shard.GradientShard.reduce"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_a_gradient_is_the_mean_over_ranks_not_their_sum"


def mutant(self) -> None:
    arriving = self._room.new_empty(self.flat.shard_numel)
    handle = reduce_scatter(
        arriving, self._room, op="sum", group=self._group, async_op=True, pattern=self._pattern
    )
    self._arriving = arriving, handle
