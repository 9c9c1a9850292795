"""Clipping is too strong: the norm counts replicated parameters once for each rank."""

import torch
from torch import Tensor

from comm.collectives import all_reduce

TARGET = "tensor_parallel.parallel_model.TensorParallel.clip_grad_norm_"
KILLER = "tests.tensor_parallel.test_parallelize.test_replicated_parameters_count_once_in_the_norm"
CAUSE = "counted on each"


def mutant(self, max_norm: float) -> Tensor:
    gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
    total = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    all_reduce(total, group=self.group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm
