"""A model is a chain of parts, and a stage is a run of consecutive parts.

      GPT      [embedding][block 0][block 1][block 2][block 3][norm, head]
      stages   |------- 0 --------|-- 1 ---|-- 2 ---|--------- 3 --------|

A stage keeps its modules under the names that they have in the full model, so checkpoints, gradients and
comparisons find its parameters under the same names. balance.py cuts a model into stages.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lab.models.parts import Part
from lab.trace.device_clock import DeviceClock, Later
from training.valid_targets import is_valid

LossOf = Callable[[Tensor, Tensor], Tensor]


class Stage(nn.Module):
    """Runs consecutive parts of `model`, one after the other. It shares the modules with the model.

    `stage(x)` is the output, and on the last stage `stage(x, target)` the mean loss. With `recompute` only
    `x` is kept for the backward, which computes the forward again (Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", 2016, arXiv:1604.06174). With a `clock` nothing is computed.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts, self.config = parts, getattr(model, "config", None)  # GPT.embed looks at the config
        self.recompute = False
        self.loss_of: LossOf | None = None
        self.clock: DeviceClock | None = None
        self.output: Tensor | None = None  # its shape and dtype, see `OwnStages`
        self.deferring: Callable[[Later], AbstractContextManager[Any]] | None = None  # deferred.py
        for path in (path for part in parts for path in part.modules):
            container, _, name = path.rpartition(".")
            if container and container not in self._modules:
                self.add_module(container, nn.ModuleDict())
            (self.get_submodule(container) if container else self).add_module(name, model.get_submodule(path))

    def forward(self, x: Tensor, target: Tensor | None = None, later: Later | None = None) -> Tensor:
        """Return the output or the loss. With `later` the backward leaves weight gradients to that list."""
        if self.clock is not None:
            return self.clock.forward(x, self.output if target is None else None, later)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x, target, later, use_reentrant=False)  # type: ignore[no-any-return]
        return self._compute(x, target, later)

    def _compute(self, x: Tensor, target: Tensor | None, later: Later | None) -> Tensor:
        with nullcontext() if later is None or self.deferring is None else self.deferring(later):
            for part in self.parts:
                x = part.forward(self, x)
        if target is not None:
            assert self.loss_of is not None, "only the last stage has a loss"
            # The mean over no target at all is not a number.
            return torch.where(is_valid(target).any(), self.loss_of(x, target), 0)
        # Under torch.autocast the next stage still gets the dtype that it expects.
        return x if self.output is None else x.to(self.output.dtype)

    def output_like(self, x: Tensor) -> Tensor:
        """Return the shape and dtype of the output, as a tensor on device "meta"; nothing is computed."""
        held = {name: tensor.to("meta") for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        with torch.no_grad():
            return functional_call(self, held, (x.to("meta"),))  # type: ignore[no-any-return]
