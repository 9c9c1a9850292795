"""Run one stage: the forward, the backward or its halves of one microbatch after the other.

    runner = AutogradRunner(stage, microbatches=8, loss_of=loss_of)      # the last stage has a loss
    y = runner.forward(3, x)
    dx = runner.backward(3, dy)      # or runner.backward_input(3, dy), and later runner.backward_weight(3)

What a microbatch needs for its backward is kept from its forward to its backward, and no longer. The output
is not kept: autograd starts the backward at the output's place in the graph (a gradient edge), so the memory
of the output is free once it has been sent.

With `recompute` only the input is kept, and the backward computes the forward again (Chen et al., "Training
Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipeline_parallel.batches import validated_loss
from pipeline_parallel.deferred import DeferredGradients, deferring
from pipeline_parallel.stage import Stage

LossOf = Callable[[Tensor, Tensor], Tensor]


class StageRunner(Protocol):
    """Defines what the executor needs of a stage."""

    def begin_step(self) -> None:
        """Begin a step, and forget what an earlier step has left."""

    def forward(self, microbatch: int, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the stage's output, or with a target the microbatch's share of the loss."""

    def forward_only(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the stage's output, or with a target the microbatch's loss. Keep nothing."""

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """Return the gradient of the input (None if it needs none), given that of the output.

        `dy` is None for the loss.
        """

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """Do what `backward` does, but leave the gradients of the weights to `backward_weight`."""

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of the weights that `backward_input` has left."""

    def deferred_tensors(self, microbatch: int) -> list[Tensor]:
        """Return the tensors that `backward_weight` will need."""

    def add_wait(self, seconds: float) -> None:
        """Note how long the rank has waited for messages since the last action."""

    def last_span(self) -> tuple[int, int] | None:
        """Return start and end of the last action in nanoseconds, if they differ from those of the call."""


class AutogradRunner:
    """Runs a stage by autograd.

    The loss is divided by `microbatches`, so that the gradients add up to those of the mean. `split` prepares
    forwards for `backward_input` and `backward_weight`. The output has `output_dtype` under torch.autocast,
    too.
    """

    def __init__(
        self,
        stage: Stage,
        microbatches: int,
        loss_of: LossOf | None = None,
        recompute: bool = False,
        split: bool = False,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self.stage, self.microbatches, self.loss_of = stage, microbatches, loss_of
        self.recompute, self.split, self.output_dtype = recompute, split, output_dtype
        self._begun: dict[int, tuple[Tensor, GradientEdge | None]] = {}
        self.deferred_gradients: dict[int, DeferredGradients] = {}

    def forward(self, microbatch: int, x: Tensor, target: Tensor | None = None) -> Tensor:
        deferred = DeferredGradients() if self.split else None
        if deferred is not None:
            self.deferred_gradients[microbatch] = deferred
        y = self.with_graph(x, target, deferred)
        self._begun[microbatch] = x, get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    @torch.no_grad()
    def forward_only(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        return self._output_or_loss(self.stage(x), target).detach()

    def with_graph(
        self, x: Tensor, target: Tensor | None = None, deferred: DeferredGradients | None = None
    ) -> Tensor:
        """Return what `forward` returns, with the graph that a backward needs."""
        if self.recompute:
            return checkpoint(self._compute, x, target, deferred, use_reentrant=False)
        return self._compute(x, target, deferred)

    def _compute(self, x: Tensor, target: Tensor | None, deferred: DeferredGradients | None) -> Tensor:
        if deferred is not None:
            with deferring(deferred):
                y = self.stage(x)
        else:
            y = self.stage(x)
        y = self._output_or_loss(y, target)
        return y if target is None else y / self.microbatches

    def _output_or_loss(self, y: Tensor, target: Tensor | None) -> Tensor:
        if target is None:
            # The next stage casts its input as it needs it, and autograd casts the gradient back.
            is_cast = self.output_dtype is not None and torch.is_autocast_enabled(y.device.type)
            return y.to(self.output_dtype) if is_cast else y
        assert self.loss_of is not None, "only the last stage has a loss, and a target"
        return validated_loss(self.loss_of(y, target))

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        dx = self.backward_input(microbatch, dy)
        if self.split:
            self.backward_weight(microbatch)
        return dx

    def backward_input(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        x, edge = self._begun.pop(microbatch)
        if edge is not None:  # a first stage that is frozen has no gradient to compute
            with without_autocast(x):
                torch.autograd.backward([edge], [dy])
        return x.grad

    def backward_weight(self, microbatch: int) -> None:
        with without_autocast(*self.deferred_gradients[microbatch].tensors[:1]):
            self.deferred_gradients.pop(microbatch).run()

    def deferred_tensors(self, microbatch: int) -> list[Tensor]:
        return self.deferred_gradients[microbatch].tensors

    def begin_step(self) -> None:
        self._begun.clear()  # of a step that failed
        self.deferred_gradients.clear()

    def add_wait(self, seconds: float) -> None:
        pass

    def last_span(self) -> None:
        return None


def without_autocast(*of: Tensor) -> AbstractContextManager[object]:
    """Switch torch.autocast off for a backward, which computes in the dtypes that its forward recorded."""
    if any(torch.is_autocast_enabled(tensor.device.type) for tensor in of):
        return torch.autocast(of[0].device.type, enabled=False)
    return nullcontext()
