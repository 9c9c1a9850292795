"""In a pipeline the formulas exceed the counted bytes: each stage is expected to run all layers."""

from collections.abc import Iterator

from hybrid_parallel.hybrid import HybridParallel
from tensor_parallel.expected_traffic import parts_of

TARGET = "hybrid_parallel.traffic._stages"
KILLER = "tests.hybrid_parallel.test_equivalence.test_pipelines_of_divided_layers_equal_one_process"
CAUSE = "and nothing of another rank"


def mutant(hybrid: HybridParallel) -> Iterator[set[str]]:
    for stage in [hybrid.plain]:
        yield parts_of(name for name, _ in stage.named_parameters(remove_duplicate=False))
