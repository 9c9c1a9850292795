"""The weight gradient apart from the input gradient, so that a schedule can choose when to compute it.

      y = x W^T       input gradient   dx = dy W        the stage before waits for it
                      weight gradient  dW = dy^T x      nobody waits for it before the optimizer's step

Autograd computes both in one node. Inside `deferring(jobs)` linear layers and convolutions become nodes whose
backward returns dx and puts the computation of dW into `jobs`, together with x and dy, which it needs and
which therefore stay in memory until then. The gradients of biases go with dW; norms' and embeddings' are
computed at once with the input's, for they cost next to nothing.

dW is added to `weight.grad` in the product itself, without a tensor of its own, so hooks on the parameter do
not see it. After Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.
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
class Jobs:
    """Weight gradients of one microbatch that are still to be computed, and the tensors they hold."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, job: Callable[[], None], *tensors: Tensor) -> None:
        self.waiting.append(job)
        self.tensors += tensors

    @torch.no_grad()
    def run(self) -> None:
        """Compute them, add them to the parameters' gradients, and forget what they needed."""
        self.tensors.clear()
        while self.waiting:
            self.waiting.pop()()


@contextmanager
def deferring(jobs: Jobs) -> Iterator[None]:
    """Around a forward: its backward will leave weight gradients to `jobs`."""
    with _Deferring(jobs):
        yield


class _Deferring(TorchFunctionMode):
    """Replaces two functions of torch by ours, whoever calls them."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() and func == F.linear:
            return _Linear.apply(self._jobs, *_linear_arguments(*args, **kwargs))
        if torch.is_grad_enabled() and func == F.conv2d:
            return _Conv2d.apply(self._jobs, *_conv2d_arguments(*args, **kwargs))
        return func(*args, **kwargs)


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
    if isinstance(padding, str):
        raise NotImplementedError(f"padding={padding!r}: give the number of pixels.")
    pairs = ([value] * 2 if isinstance(value, int) else list(value) for value in (stride, padding, dilation))
    return input, weight, bias, *pairs, groups


class _Linear(torch.autograd.Function):
    """y = x W^T + b. Only dx is computed in the backward."""

    @staticmethod
    def forward(ctx: Any, jobs: Jobs, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved: recomputation would hand back a copy, and the gradient belongs to the parameter itself.
        ctx.weight, ctx.bias, ctx.jobs = weight, bias, jobs
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias

        def weights() -> None:
            rows_of_dy, rows_of_x = dy.flatten(0, -2), x.flatten(0, -2)
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = rows_of_dy.t() @ rows_of_x
                else:
                    weight.grad.addmm_(rows_of_dy.t(), rows_of_x)
            if bias is not None and bias.requires_grad:
                _add_to(bias, rows_of_dy.sum(0))

        if any(ctx.needs_input_grad[2:]):
            ctx.jobs.add(weights, x, dy)
        return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None


class _Conv2d(torch.autograd.Function):
    """A convolution. Only the input's gradient is computed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, jobs: Jobs, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.jobs, ctx.settings = weight, bias, jobs, settings
        return F.conv2d(x, weight, bias, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        stride, padding, dilation, groups = ctx.settings

        def gradients(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            sizes = None if bias is None else [len(bias)]
            return torch.ops.aten.convolution_backward(
                dy, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups, wanted
            )

        def weights() -> None:
            has_bias = bias is not None and bias.requires_grad
            _, dw, db = gradients(False, weight.requires_grad, has_bias)
            if weight.requires_grad:
                _add_to(weight, dw)
            if has_bias:
                _add_to(bias, db)

        if any(ctx.needs_input_grad[2:4]):
            ctx.jobs.add(weights, x, dy)
        dx = gradients(True, False, False)[0] if ctx.needs_input_grad[1] else None
        return None, dx, None, None, *[None] * len(ctx.settings)


def _add_to(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
