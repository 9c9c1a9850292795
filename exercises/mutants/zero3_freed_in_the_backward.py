"""A segmentation fault in the backward, or "storage of size 0": the weights went after the forward."""

TARGET = "data_parallel.fully_sharded.FullyShardedDataParallel._before_backward"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_a_block_is_whole_in_its_forward_and_its_backward"


def mutant(self, turn: int) -> None:
    block = self._ran[turn]
    for later in self._ran[turn + 1 :]:
        if later is not block and later.turns == later.runs:
            self._finish(later)
    block.turns += 1
