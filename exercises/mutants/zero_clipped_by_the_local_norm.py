"""Clipped gradients are too long and change direction: each rank clips by the norm of its own shard."""

import torch
from torch import Tensor, nn

TARGET = "training.clipping.clip_grad_norm_"
KILLER = "tests.zero.test_zero_mutant_killers.test_gradients_are_clipped_by_the_norm_over_all_shards"
CAUSE = "one rank's part"


def mutant(pieces: list[nn.Parameter], max_norm: float, group, pattern) -> Tensor:
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
