"""Clipping on a mesh. Write `counted_elsewhere` and `clip_over` of hybrid_parallel/clipping.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/clipping.py yet: it has
the solution.

You may use:

    all_reduce(tensor, op='sum', group=None, async_op=False, pattern=None) -> Work
        Replace every rank's `tensor` by the reduction of all, bitwise the same on every rank.
    sum_of_squares(gradient: Tensor) -> Tensor
        Return the sum of squares, in float64.

Check it with `python -m exercises check clip_on_a_mesh`.
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
    """Return the parameters of this rank whose gradients another rank of its replica counts.

    `pipeline` and `tensor` are None for an axis of one rank. The keys of `tensor.dims` are the names
    of the parameters that the ranks of `tensor.group` divide; of all others each of these ranks has
    the full gradient. `tensor.module.named_parameters(remove_duplicate=False)` gives this rank's
    names and parameters. `pipeline.later_copies()` returns the parameters that an earlier stage also
    has.
    """
    raise NotImplementedError("`counted_elsewhere` is not written yet.")


def clip_over(
    axes: Sequence[Group],
    gradients: Iterable[tuple[Tensor, Tensor | None]],
    uncounted: set[nn.Parameter],
    max_norm: float,
    pattern: str | None,
    device: torch.device | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over all ranks of the axes is at most `max_norm`.

    `gradients` has pairs of a parameter and what this rank holds of its gradient, or None. The
    gradients of `uncounted` parameters are scaled, and do not count in the norm. `axes` are the
    groups over which the squares are added up, along one axis after the other. All ranks take
    part, also one that has no gradient: it adds zero, on `device`. Return the norm before the
    scaling, in float64. The gradients are multiplied by max_norm / (norm + 1e-6), but never by
    more than 1, in place: `gradient.as_subclass(Tensor).mul_(scale)`.
    """
    raise NotImplementedError("`clip_over` is not written yet.")
