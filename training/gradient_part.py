"""Let torch's own tools see a gradient of which each rank has a part as one gradient.

      nn.utils.clip_grad_norm_(model.parameters(), 1.0)    the norm over all ranks
      scaler.step(optimizer)                               skipped by all ranks, or by none

Where GradScaler looks for infinities, and where the norms of gradients are computed, the ranks all-reduce a
few numbers. FSDP2's DTensors do the same. Everything else sees the part as the plain tensor that it is.
"""

import math
from typing import Any

import torch
from torch import Tensor

from comm.collectives import Group, all_reduce


class GradientPart(Tensor):
    """This rank's part of a gradient. All ranks must compute the norms of the same gradients."""

    group: Group
    pattern: str | None

    @staticmethod
    def of(part: Tensor, group: Group, pattern: str | None) -> "GradientPart":
        """Return `part`, in the same memory, as a part of what the group has."""
        result: GradientPart = torch.Tensor._make_subclass(GradientPart, part)
        result.group, result.pattern = group, pattern
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_all_ranks = getattr(cls, _OF_ALL_RANKS[func]) if func in _OF_ALL_RANKS else func
        with torch._C.DisableTorchFunctionSubclass():
            return of_all_ranks(*args, **(kwargs or {}))

    @staticmethod
    def norm_of_one(part: Tensor, ord: float = 2, dim: Any = None, **options: Any) -> Tensor:
        """Return torch.linalg.vector_norm of the full gradient, on all ranks."""
        return GradientPart.norms([part], ord, options.get("dtype"))[0]

    @staticmethod
    def norms(
        parts: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the norm of each full gradient, on all ranks, by one all-reduce for all gradients.

        Plain tensors among `parts` are full gradients already, as those of replicated parameters are.
        """
        own = [part for part in parts if isinstance(part, GradientPart)]
        total = torch.stack([_powers(part, float(ord), dtype) for part in own])
        how = {math.inf: "max", -math.inf: "min"}.get(float(ord), "sum")
        all_reduce(total, op=how, group=own[0].group, pattern=own[0].pattern)
        if how == "sum" and ord != 0:
            total = total.pow(1 / ord)
        norms = iter(total.to(dtype or own[0].abs().dtype))
        return [
            next(norms)
            if isinstance(part, GradientPart)
            else torch.linalg.vector_norm(part, ord, dtype=dtype)
            for part in parts
        ]

    @staticmethod
    def unscale(parts: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
        """Divide the parts by the scale; `found_inf` is 1 on all ranks if any has an infinity or NaN."""
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse_scale)
        part = next(part for part in parts if isinstance(part, GradientPart))
        all_reduce(found_inf, op="max", group=part.group, pattern=part.pattern)


_OF_ALL_RANKS = {
    torch.linalg.vector_norm: "norm_of_one",
    torch._foreach_norm: "norms",
    torch._amp_foreach_non_finite_check_and_unscale_: "unscale",
}


def _powers(part: Tensor, ord: float, dtype: torch.dtype | None) -> Tensor:
    """Return the number of this rank that is summed over ranks, or whose maximum or minimum is taken."""
    size = part.abs()
    size = size.to(dtype) if dtype is not None else size.float() if size.itemsize < 4 else size
    if math.isinf(ord):
        least = 0.0 if ord > 0 else math.inf
        extreme = torch.max if ord > 0 else torch.min
        return extreme(torch.cat([size.flatten(), size.new_tensor([least])]))
    return (size != 0).sum().to(size.dtype) if ord == 0 else size.pow(ord).sum()
