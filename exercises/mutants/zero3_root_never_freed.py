"""Embeddings and head do not learn: their gathered copy is never freed, so updates do not reach it."""

TARGET = "zero.blocks.ShardedBlock.free"
KILLER = "tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters"
CAUSE = "old copies freed"


def mutant(self) -> None:
    for unit in self.units:
        if unit.name == "root":
            unit.gather()
        else:
            unit.free()
