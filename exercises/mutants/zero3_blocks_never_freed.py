"""The loss hardly falls: gathered blocks are never freed, so each step computes with the first weights."""

TARGET = "zero.blocks.ShardedBlock.free"
KILLER = "tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters"
CAUSE = "old copies freed"


def mutant(self) -> None:
    for unit in self.units:
        unit.gather()  # ends a gather that has begun
