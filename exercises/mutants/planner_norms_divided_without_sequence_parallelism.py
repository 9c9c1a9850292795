"""A plan with tensor parallelism runs out of memory: norms and residuals count as divided, too."""

from hybrid_parallel.planner.memory_model import ITEMSIZE
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.sizes import ParallelSizes

TARGET = "hybrid_parallel.planner.memory_model.layer_activations"
KILLER = "tests.hybrid_parallel.test_planner_memory.test_norms_are_divided_by_sequence_parallelism_only"


def mutant(shape: ModelShape, sizes: ParallelSizes) -> float:
    c, mask = ITEMSIZE[sizes.precision], 1 if shape.dropout else 0
    numbers = 4 * shape.width + 2 * shape.query_width + 2 * shape.kv_width
    numbers += shape.active_experts * (3 if shape.gated else 2) * shape.inner_width
    scores = 0 if shape.fused_attention else shape.num_heads * shape.sequence_length * (2 * c + mask)
    return (numbers * c + 2 * shape.width * mask + scores) / sizes.tensor
