"""Results are right but each backward waits: the block that is prefetched has been used already."""

TARGET = "zero.train_zero3.FullyShardedDataParallel._before_backward"
KILLER = "tests.zero.test_zero_mutant_killers.test_the_next_block_is_gathered_while_one_computes"
CAUSE = "start too late"


def mutant(self, turn) -> None:
    self._begin_backward()
    turn.block.gather()
    turn.has_begun, at = True, self._turns.index(turn)
    for later in self._turns[at + 1 :]:
        later.block.finish(self._reductions)
    if at + 1 < len(self._turns):
        self._turns[at + 1].block.start_gather()
