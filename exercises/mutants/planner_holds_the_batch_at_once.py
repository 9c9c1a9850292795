"""The planner asks for too many devices: each microbatch counts as large as a replica's batch."""

from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.sizes import ParallelSizes

TARGET = "hybrid_parallel.planner.memory_model.tokens_of"
KILLER = (
    "tests.hybrid_parallel.test_planner_memory.test_microbatches_divide_what_a_step_holds_without_a_pipeline"
)
CAUSE = "is a division missing, such as that by the number of microbatches"


def mutant(shape: ModelShape, sizes: ParallelSizes, batch: int) -> float:
    return batch / sizes.data * shape.sequence_length / sizes.context
