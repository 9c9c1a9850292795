"""Clip gradients by their norm over all ranks, where each rank has a part of them.

on this rank                                   in the norm
a shard of a gradient, or a stage's own        added up over the ranks
`uncounted`: another rank has the same         left out; that rank counts it

norm = sqrt(sum of squares): each rank adds up what it counts, and all-reduces the sum
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[Group],
    pattern: str | None = None,
    uncounted: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients as torch's clip_grad_norm_ does on one process, and return the norm before that.

    All ranks of each group call it with what each has, and get the same norm, in float64. Squares are added
    up over one group after the other. `device` is needed where a rank has no parameters.
    """
    parameters = list(parameters)
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device if device is None else device)
    for parameter in parameters:
        if parameter.grad is not None and parameter not in uncounted:
            gradient = parameter.grad.as_subclass(Tensor)  # it may be a shard
            # A square of float16 overflows at 256.
            values = gradient.float() if gradient.itemsize < 4 else gradient
            total += values.square().sum().double()
    for group in groups:
        all_reduce(total, group=group, pattern=pattern)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
