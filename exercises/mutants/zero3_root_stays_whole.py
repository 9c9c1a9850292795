"""Blocks learn, while embeddings and the head stay what they were: their gathered copy outlives the step."""

TARGET = "data_parallel.blocks.Block.free"
KILLER = (
    "tests.data_parallel.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters"
)


def mutant(self) -> None:
    for unit in self.units:
        if unit.name == "root":
            unit.gather()
        else:
            unit.free()
