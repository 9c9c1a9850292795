"""Turn a stage's runner into a plain forward, whose result has a graph for `backward()`.

runner (stage_runner.py, clock.py)  forward(3, x), backward(3, dy)      keep what a microbatch needs by number
here                                y = stage(x), y.backward(dy)        autograd keeps it with y
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline_parallel.clock import ClockRunner
from pipeline_parallel.stage_runner import AutogradRunner, StageRunner


def forward_of(runner: StageRunner, is_last: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return `stage` and `loss_of` for the lesson; the last rank's `loss_of` computes its stage, too.

    So recomputation, and the clock, take the loss for a part of the last stage's forward.
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
    """A forward and a backward that compute nothing and take the clock's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, runner: ClockRunner, target: Tensor | None) -> Tensor:
        ctx.runner, ctx.is_last = runner, target is not None
        return runner.forward(0, x, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        dx = ctx.runner.backward(0, None if ctx.is_last else gradients[0])
        return dx if ctx.needs_input_grad[0] else None, None, None, None
