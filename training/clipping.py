"""Gradients clipped by their norm over all ranks, where each rank has a shard of them."""

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce


def clip_grad_norm_(pieces: list[nn.Parameter], max_norm: float, group: Group, pattern: str | None) -> Tensor:
    """Clip as torch's clip_grad_norm_ does on the full gradients: every element is in one rank's pieces."""
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    squares = [_square_norm(gradient) for gradient in gradients]
    total = torch.stack(squares).sum() if squares else pieces[0].new_zeros((), dtype=torch.float32)
    all_reduce(total, group=group, pattern=pattern)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _square_norm(gradient: Tensor) -> Tensor:
    """In float32 at least; a complex number counts with both its parts."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return (numbers.float() if numbers.itemsize < 4 else numbers).square().sum()
