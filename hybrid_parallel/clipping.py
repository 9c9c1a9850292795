"""Clip gradients by their norm over a mesh: every number of the full model counts once.

      axis        what ranks have                                 what is added up
      pipeline    different stages; the tied embedding is on two  all stages, without the later copy
      tensor      parts of the divided parameters; the others,    all parts; the others on the first rank only
                  such as LayerNorm's weights, in full
      data        without ZeRO the same gradients                 nothing
                  with ZeRO different shards                      all shards

norm = sqrt(sum of squares): each rank adds up what it counts, and all-reduces the sum along each axis
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm.collectives import Group, all_reduce
from pipeline_parallel.pipeline import Pipeline
from tensor_parallel.parallelize import TensorParallel
from training.clipping import sum_of_squares


def counted_elsewhere(pipeline: Pipeline | None, tensor: TensorParallel | None) -> set[nn.Parameter]:
    """Return the parameters of this rank whose gradients another rank of its replica counts."""
    found: set[nn.Parameter] = set()
    if pipeline is not None:
        found |= pipeline.later_copies()
    if tensor is not None and dist.get_rank(tensor.group) > 0:
        named = tensor.module.named_parameters(remove_duplicate=False)
        found |= {parameter for name, parameter in named if name not in tensor.dims}
    return found


def clip_over(
    axes: Sequence[Group],
    gradients: Iterable[tuple[Tensor, Tensor | None]],
    uncounted: set[nn.Parameter],
    max_norm: float,
    pattern: str | None,
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over all ranks of the axes is at most `max_norm`.

    `gradients` has, for each parameter, what this rank holds of its gradient. All ranks must call it; one
    without any gradient needs the `device` on which the others have theirs. Return the norm before the
    scaling, in float64.
    """
    gradients = [(parameter, gradient) for parameter, gradient in gradients if gradient is not None]
    if gradients and device is None:
        device = gradients[0][1].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter, gradient in gradients:
        if parameter not in uncounted:
            total += sum_of_squares(gradient.as_subclass(Tensor))
    for axis in axes:
        all_reduce(total, group=axis, pattern=pattern)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.as_subclass(Tensor).mul_(scale)
    return norm
