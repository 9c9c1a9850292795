"""Refuse functions of torch that would take the gradients of one rank's stages for those of the full model.

      nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0)    another norm, so another scale, on each rank
      scaler.step(optimizer)                                  one rank skips the step, others take it

The ranks have gradients of different parameters, so they cannot exchange a number for each parameter, as
tensor parallel ranks do.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lab.launch.errors import WorkbookError

_CLIPPING = (
    "torch's clip_grad_norm_ would take the norm of this rank's stages only: call the pipeline's own "
    "clip_grad_norm_(max_norm). For the norm of one gradient take parameter.grad.norm()."
)
_SCALING = (
    "A GradScaler would look for infinities in this rank's stages only, and skip a step that other ranks "
    "take: train in bfloat16, which needs no scaler."
)
_REFUSED = {
    torch.linalg.vector_norm: _CLIPPING,
    torch._foreach_norm: _CLIPPING,
    torch._amp_foreach_non_finite_check_and_unscale_: _SCALING,
}


class StageGradient(Tensor):
    """Behaves as a plain tensor, except that the refused functions raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _REFUSED:
            raise WorkbookError(_REFUSED[func])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def refuse_norms_of_a_stage(parameters: Iterable[nn.Parameter]) -> None:
    """Make torch refuse to take norms of the gradients of `parameters`, or to look for infinities."""
    for parameter in parameters:
        if type(parameter.grad) is Tensor:
            parameter.grad = torch.Tensor._make_subclass(StageGradient, parameter.grad)  # type: ignore[attr-defined]
