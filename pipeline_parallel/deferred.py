"""Separate the weight gradient from the input gradient, so that a schedule can choose when to compute it.

      y = x W^T       input gradient   dx = dy W        the stage before waits for it
                      weight gradient  dW = dy^T x      only the optimizer's step waits for it

Autograd computes both in one node. Inside of `Deferring(later)` a linear layer becomes a node whose backward
returns dx, and appends the computation of dW to the list `later`. That computation needs x and dy, so both
stay in memory until it is done. The gradient of a bias is computed with dW; those of norms, embeddings and
convolutions at once with dx.

dW is added to `weight.grad` outside of autograd. So a layer is left as it is if autograd would do more with
dW than that: run a hook of the user, or go on to what the weight was computed from.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.autograd import hooks_of
from lab.trace.device_clock import Later
from lab.trace.memory import note_held

WRAPPERS = ("training", "data_parallel", "zero")


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
        y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return y.detach()  # y may be a view, in which nn.ReLU(inplace=True) could not write

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        [x] = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias

        def weights() -> None:
            rows_of_dy, rows_of_x = dy.flatten(0, -2), x.flatten(0, -2).conj()
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
        return None, dy @ weight.to(dy.dtype).conj() if ctx.needs_input_grad[1] else None, None, None


def add_to(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter, or begin it."""
    if parameter.grad is None:
        # With the parameter's strides, because a fused optimizer pairs elements by their order in memory.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    else:
        parameter.grad += gradient


def can_be_split(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether these are a layer's input and its own parameters, whose gradients are only added up."""
    parameters = [weight] if bias is None else [weight, bias]
    return (
        torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()  # such as vmap, whose tensors are of another kind
        and (type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_nested)
        and (x.dim() > 1 and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1]))
        # A stage's input is a leaf, too, and may stand where the weight does.
        and all(type(each) is nn.Parameter and each.is_leaf and not is_watched(each) for each in parameters)
    )


def is_watched(parameter: Any) -> bool:
    """Return whether a hook waits for the gradient. Those of wrappers do not: they take the step's sum."""
    hooks = [getattr(hook, "func", hook) for hook in hooks_of(parameter)]
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] not in WRAPPERS for hook in hooks)


class Deferring(TorchFunctionMode):
    """Makes the linear layers that are called in a `with` block leave their weight gradients to `later`.

    A backward needs the block, too: it may compute layers again (torch.utils.checkpoint).
    """

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and can_be_split(*args):
            x, weight, bias = (*args, None)[:3]
            is_cast = x.is_floating_point() and x.dtype != torch.float64
            if is_cast and torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))  # as autocast does for a linear layer
            return SplitLinear.apply(self._later, x, weight, bias)
        before = len(self._later)
        result = func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:  # part of a forward, such as a force: it adds to no gradients
            del self._later[before:]
        return result
