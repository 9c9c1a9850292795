"""Clip gradients by their norm over all ranks, where each rank has a part of them.

on this rank                                   in the norm
a shard of a gradient, or a stage's own        summed over the ranks
`replicated`: all ranks have the same          added once
`copies`: another rank has the same            left out; that rank counts it

norm = sqrt(all-reduce(sum of squares of the parts) + sum of squares of the replicated)
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    group: Group = None,
    pattern: str | None = None,
    replicated: Collection[nn.Parameter] = (),
    copies: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients as torch's clip_grad_norm_ does on one process, and return the norm before that.

    All ranks of `group` call it with what each has, and get the same norm, in float64. `device` is needed
    where a rank has no parameters.
    """
    parameters = list(parameters)
    device = parameters[0].device if device is None else device
    parts, common = torch.zeros(2, dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and parameter not in copies:
            (common if parameter in replicated else parts).add_(sum_of_squares(parameter.grad))
    all_reduce(parts, group=group, pattern=pattern)
    norm = (parts + common).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares, in float64."""
    values = gradient.float() if gradient.itemsize < 4 else gradient  # a square of float16 overflows at 256
    return values.square().sum().double()
