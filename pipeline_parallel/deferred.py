"""Separate the weight gradient from the input gradient, so that a schedule can choose when to compute it.

      y = x W^T       input gradient   dx = dy W        the stage before waits for it
                      weight gradient  dW = dy^T x      only the optimizer's step waits for it

Autograd computes both in one node. Inside of `Deferring(later)` a linear layer becomes a node whose backward
returns dx, and appends the computation of dW to the list `later`. That computation needs x and dy, so both
stay in memory until it is done. The gradient of a bias is computed with dW; those of norms, embeddings and
convolutions at once with dx.

dW is added to `weight.grad` outside of autograd, so hooks on the parameter do not see it.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lab.trace.device_clock import Later
from lab.trace.memory import note_held


@torch.no_grad()
def compute_gradients(later: Later) -> None:
    """Compute the gradients that were left, and free the tensors that they needed."""
    while later:
        later.pop()()


class SplitLinear(torch.autograd.Function):
    """Computes y = x W^T + b. Its backward computes dx alone, and leaves dW and db to `later`."""

    @staticmethod
    def forward(ctx: Any, later: Later, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        # No save_for_backward: recomputation would return a copy, but the parameter itself gets the gradient.
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        [x] = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias

        def weights() -> None:
            rows_of_dy, rows_of_x = dy.flatten(0, -2), x.flatten(0, -2)
            if weight.requires_grad:
                if weight.grad is None or weight.grad.dtype != dy.dtype:
                    add_to(weight, rows_of_dy.t() @ rows_of_x)
                else:
                    weight.grad.addmm_(rows_of_dy.t(), rows_of_x)
            if bias is not None and bias.requires_grad:
                add_to(bias, rows_of_dy.sum(0))

        if any(ctx.needs_input_grad[2:]):
            ctx.later.append(weights)
            note_held(x, dy)
        return None, dy @ weight.to(dy.dtype) if ctx.needs_input_grad[1] else None, None, None


def add_to(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter, or begin it."""
    if parameter.grad is None:
        # With the parameter's strides, because a fused optimizer pairs elements by their order in memory.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad += gradient


class Deferring(TorchFunctionMode):
    """Makes the linear layers that a forward calls in a `with` block leave their weight gradients to `later`.

    The weight must be a parameter, not a tensor that is computed from one.
    """

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled() and not kwargs:
            x, weight, bias = (*args, None)[:3]
            if x.dim() > 1 and weight.is_leaf and (bias is None or bias.is_leaf):
                if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
                    x = x.to(torch.get_autocast_dtype(x.device.type))  # as autocast does for a linear layer
                return SplitLinear.apply(self._later, x, weight, bias)
        return func(*args, **(kwargs or {}))
