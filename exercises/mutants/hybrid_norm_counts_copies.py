"""Runs on more ranks clip harder: numbers that several ranks hold count several times in the norm."""

from torch import nn

TARGET = "hybrid_parallel.clipping.counted_elsewhere"
KILLER = "tests.hybrid_parallel.test_equivalence.test_pipelines_of_divided_layers"
CAUSE = "Count it once"


def mutant(pipeline: object, tensor: object) -> set[nn.Parameter]:
    return set()
