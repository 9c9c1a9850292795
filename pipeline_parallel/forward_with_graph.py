"""Turn the runner of a stage into a plain function, whose result has a graph for `backward()`.

      a runner      forward(3, x), then backward(3, dy)      keeps what a microbatch needs under its number
      here          y = stage(x), then y.backward(dy)        autograd keeps it with y

The hand-written lessons call the stage in this plain way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline_parallel.clock import ClockRunner
from pipeline_parallel.stage_runner import AutogradRunner, StageRunner


def forward_of(runner: StageRunner, is_last: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return `stage` and `loss_of` for a lesson. On the last rank `loss_of` computes the stage as well.

    So recomputation and the clock count the loss as a part of the last stage's forward.
    """

    def forward(x: Tensor, target: Tensor | None = None) -> Tensor:
        if isinstance(runner, AutogradRunner):
            y = runner.with_graph(x, target)
        else:
            assert isinstance(runner, ClockRunner)
            y = _ByTheClock.apply(x, torch.zeros((), requires_grad=True), runner, target)
        return y if y.requires_grad else y.requires_grad_()  # where all layers are frozen

    return (lambda x: x if is_last else forward(x)), forward


class _ByTheClock(torch.autograd.Function):
    """Lasts as long as a forward and a backward on the clock, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, runner: ClockRunner, target: Tensor | None) -> Tensor:
        ctx.runner, ctx.is_last = runner, target is not None
        return runner.forward(0, x, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        dx = ctx.runner.backward(0, None if ctx.is_last else gradients[0])
        return dx if ctx.needs_input_grad[0] else None, None, None, None
