"""Clip gradients by their norm over all ranks, where each rank has a part of them.

on this rank                                   in the norm
a shard of a gradient, or a stage's own        added up over the ranks
`uncounted`: another rank has the same         left out; that rank counts it

norm = sqrt(sum of squares): each rank adds up what it counts, and all-reduces the sum. The same is true of
other powers, and of the largest absolute value (norm_type inf), which is reduced by "max".
"""

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce
from lab.launch.errors import WorkbookError


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[Group],
    norm_type: float = 2.0,
    uncounted: Collection[nn.Parameter] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients as torch's clip_grad_norm_ does on one process, and return the norm before that.

    All ranks of each group call it with what each has, and get the same norm, in float64. Squares are added
    up over one group after the other. `device` is needed where a rank has no parameters. WorkbookError for a
    `norm_type` that is not above 0.
    """
    if not norm_type > 0:
        raise WorkbookError(f"norm_type {norm_type:g}: a norm has a power above 0, such as 2, or inf.")
    is_max = norm_type == math.inf
    parameters = list(parameters)
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device if device is None else device)
    for parameter in parameters:
        if parameter.grad is not None and parameter not in uncounted and parameter.grad.numel():
            gradient = parameter.grad.as_subclass(Tensor)  # it may be a shard
            # A square of float16 overflows at 256.
            sizes = (gradient.float() if gradient.itemsize < 4 else gradient).abs()
            if is_max:
                total = torch.maximum(total, sizes.max().double())
            else:
                total += sizes.pow_(norm_type).sum().double()
    for group in groups:
        all_reduce(total, "max" if is_max else "sum", group)
    norm = total if is_max else total ** (1 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    return norm
