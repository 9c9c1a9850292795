"""Separate the weight gradient from the input gradient, so that a schedule can choose when to compute it.

      y = x W^T       input gradient   dx = dy W        the stage before waits for it
                      weight gradient  dW = dy^T x      only the optimizer's step waits for it

Autograd computes both in one node. Inside of `deferring(deferred)` a linear layer or a 2D convolution becomes
a node whose backward returns dx and adds the computation of dW to `deferred`. That computation needs x and
dy, so both stay in memory until it is done. The gradients of biases are computed with dW; those of norms and
embeddings at once with dx, because they cost next to nothing.

dW is added to `weight.grad` outside of autograd, so hooks on the parameter do not see it.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


@dataclass
class DeferredGradients:
    """Holds one microbatch's weight gradients that are still to be computed, and the tensors they need."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, computation: Callable[[], None], *tensors: Tensor) -> None:
        self.waiting.append(computation)
        self.tensors += tensors

    @torch.no_grad()
    def run(self) -> None:
        """Compute the gradients, add them to those of the parameters, and free the tensors."""
        self.tensors.clear()
        while self.waiting:
            self.waiting.pop()()


@contextmanager
def deferring(deferred: DeferredGradients) -> Iterator[None]:
    """Make the layers that a forward calls in the `with` block leave their weight gradients to `deferred`."""
    with _Deferring(deferred):
        yield


class _Deferring(TorchFunctionMode):
    """Replaces torch.nn.functional.linear and conv2d with our own functions."""

    def __init__(self, deferred: DeferredGradients) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and func in _DEFERRED:
            arguments_of, function = _DEFERRED[func]
            x, weight, bias, *settings = arguments_of(*args, **kwargs)
            if _can_wait(func, x, weight, bias, settings):
                # Under torch.autocast products have another dtype; autograd casts the gradient back.
                return function.apply(self._deferred, _cast(x, _autocast_dtype(x)), weight, bias, *settings)
        return func(*args, **kwargs)


def _can_wait(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: list[Any]) -> bool:
    """Return whether the weight gradient can be put off.

    The weight must be a parameter, not a tensor computed from one. Inputs without a batch dimension, and
    convolutions whose padding is a string, are left to autograd.
    """
    if not weight.is_leaf or not (bias is None or bias.is_leaf) or x.dim() < 2:
        return False
    return func == F.linear or (x.dim() == 4 and not x.is_complex() and not isinstance(settings[1], str))


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of products under torch.autocast; None if it is off or leaves `x` as it is."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(x.device.type)


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias


def _conv2d_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    pairs = ([value] * 2 if isinstance(value, int) else value for value in (stride, padding, dilation))
    return input, weight, bias, *pairs, groups


class _Linear(torch.autograd.Function):
    """Computes y = x W^T + b. The backward computes dx alone."""

    @staticmethod
    def forward(
        ctx: Any, deferred: DeferredGradients, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        # No save_for_backward: recomputation would return a copy, but the parameter itself gets the gradient.
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        ctx.low = low = _autocast_dtype(x)
        return F.linear(x, _cast(weight, low), _cast(bias, low))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias

        def weights() -> None:
            rows_of_dy, rows_of_x = dy.flatten(0, -2), x.flatten(0, -2).conj()
            if weight.requires_grad:
                if weight.grad is None or weight.grad.dtype != dy.dtype:
                    _add_to(weight, rows_of_dy.t() @ rows_of_x)
                else:
                    weight.grad.addmm_(rows_of_dy.t(), rows_of_x)
            if bias is not None and bias.requires_grad:
                _add_to(bias, rows_of_dy.sum(0))

        if any(ctx.needs_input_grad[2:4]):
            ctx.deferred.add(weights, x, dy)
        dx = dy @ _cast(weight, ctx.low).conj() if ctx.needs_input_grad[1] else None
        return None, dx, None, None


class _Conv2d(torch.autograd.Function):
    """Computes a convolution. The backward computes the gradient of the input alone."""

    @staticmethod
    def forward(
        ctx: Any, deferred: DeferredGradients, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred, ctx.settings = weight, bias, deferred, settings
        ctx.low = low = _autocast_dtype(x)
        return F.conv2d(x, _cast(weight, low), _cast(bias, low), *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        stride, padding, dilation, groups = ctx.settings

        def gradients(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            sizes = None if bias is None else [len(bias)]
            return torch.ops.aten.convolution_backward(
                dy, x, _cast(weight, ctx.low), sizes, stride, padding, dilation, False, [0, 0], groups, wanted
            )

        def weights() -> None:
            has_bias = bias is not None and bias.requires_grad
            _, dw, db = gradients(False, weight.requires_grad, has_bias)
            if weight.requires_grad:
                _add_to(weight, dw)
            if has_bias:
                _add_to(bias, db)

        if any(ctx.needs_input_grad[2:4]):
            ctx.deferred.add(weights, x, dy)
        dx = gradients(True, False, False)[0] if ctx.needs_input_grad[1] else None
        return None, dx, None, None, *[None] * len(ctx.settings)


# For each function: how to put its arguments in a fixed order, and what replaces it.
_DEFERRED: dict[Any, tuple[Callable[..., tuple[Any, ...]], Any]] = {
    F.linear: (_linear_arguments, _Linear),
    F.conv2d: (_conv2d_arguments, _Conv2d),
}


def _cast(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """Return the tensor in that dtype, or as it is if there is no tensor or no dtype."""
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


def _add_to(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter, or begin it."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
