"""Replicated parameters drift apart: each rank clips by the norm of its own shards."""

import torch
from torch import Tensor

TARGET = "tensor_parallel.parallel_model.TensorParallel.clip_grad_norm_"
KILLER = "tests.tensor_parallel.test_parallelize.test_replicated_parameters_count_once_in_the_norm"
CAUSE = "one rank's part"


def mutant(self, max_norm: float) -> Tensor:
    gradients = [p.grad for p in self.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient))
    return norm
