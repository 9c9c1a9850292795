"""All results are right, and each backward waits: what is gathered early is the block that is done."""

TARGET = "data_parallel.fully_sharded.FullyShardedDataParallel._before_backward"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_the_next_block_is_on_its_way_while_one_computes"


def mutant(self, turn: int) -> None:
    block = self._ran[turn]
    for later in self._ran[turn + 1 :]:
        if later is not block and later.turns == later.runs:
            self._finish(later)
    block.turns += 1
    block.gather()
    if turn + 1 < len(self._ran):
        self._ran[turn + 1].start_gather()
