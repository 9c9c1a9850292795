"""Runs with a pipeline clip harder: a tied embedding counts in the norm once for each stage that has it."""

import torch.distributed as dist
from torch import nn

from pipeline_parallel.pipeline import Pipeline
from tensor_parallel.parallel_model import TensorParallel

TARGET = "hybrid_parallel.clipping.counted_elsewhere"
KILLER = "tests.hybrid_parallel.test_equivalence.test_pipelines_of_divided_layers_equal_one_process"
CAUSE = "Count it once"


def mutant(pipeline: Pipeline | None, tensor: TensorParallel | None) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()
    if tensor is not None and dist.get_rank(tensor.group) > 0:
        named = tensor.module.named_parameters(remove_duplicate=False)
        found |= {parameter for name, parameter in named if name not in tensor.dims}
    return found
