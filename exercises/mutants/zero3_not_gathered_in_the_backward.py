"""Results are right but each backward waits: a block is gathered unit by unit, when a unit is needed."""

TARGET = "zero.train_zero3.FullyShardedDataParallel._before_backward"
KILLER = "tests.zero.test_zero_mutant_killers.test_a_block_is_gathered_during_its_forward_and_its_backward"
CAUSE = "gathered again before the backward"


def mutant(self, turn) -> None:
    self._begin_backward()
    turn.has_begun, at = True, self._turns.index(turn)
    for later in self._turns[at + 1 :]:
        later.block.finish(self._reductions)
