"""Layers learn at different rates: each rank clips its stages by the norm of their gradients only."""

import torch
from torch import Tensor

TARGET = "pipeline_parallel.pipeline.Pipeline.clip_grad_norm_"
KILLER = "tests.pipeline_parallel.test_plausible_use.test_the_norm_is_that_of_all_stages"
CAUSE = "one rank's part"


def mutant(self, max_norm: float) -> Tensor:
    gradients = [p.grad for p in self.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm
