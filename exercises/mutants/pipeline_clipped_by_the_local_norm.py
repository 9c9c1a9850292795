"""Each rank clips the gradients of its stages by their own norm: layers learn at different rates."""

import torch
from torch import Tensor

TARGET = "pipeline_parallel.pipeline.Pipeline.clip_grad_norm_"
KILLER = "tests.pipeline_parallel.test_plausible_use.test_the_norm_is_that_of_all_stages"


def mutant(self, max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)
