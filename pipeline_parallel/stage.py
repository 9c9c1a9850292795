"""A model is a chain of parts, and a stage is a run of consecutive parts, cut by what the parts cost.

      GPT      [embedding][block 0][block 1][block 2][block 3][norm, head]
      costs         0         1        1        1        1         0
      stages   |------- 0 --------|-- 1 ---|-- 2 ---|--------- 3 --------|

The slowest stage sets the pace of a pipeline, so the most expensive stage is as cheap as can be. A part costs
its number of layers, or of parameters; counted in layers, what comes before and after a GPT's blocks costs
nothing. A stage keeps its modules under the names that they have in the full model, so checkpoints, gradients
and comparisons find its parameters.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lab.launch.errors import WorkbookError, reason
from lab.models.blocks import same_buffers
from lab.models.parts import ModelPart, as_sequential, parts_of
from lab.trace.device_clock import DeviceClock, Later
from training.valid_targets import LossOf, is_valid

Balance = Literal["layers", "parameters"]


class Stage(nn.Module):
    """Runs consecutive parts of `model`, one after the other. It shares the modules with the model.

    `stage(x)` is the output, and on the last stage `stage(x, target)` the mean loss. With `recompute` only
    `x` is kept for the backward, which computes the forward again (Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", 2016, arXiv:1604.06174). With a `clock` nothing is computed.
    """

    def __init__(self, model: nn.Module, parts: Sequence[ModelPart]) -> None:
        super().__init__()
        self.parts, self.config = parts, getattr(model, "config", None)  # GPT.embed looks at the config
        self.recompute = False
        self.loss_of: LossOf | None = None
        self.clock: DeviceClock | None = None
        self.output: Tensor | None = None  # its shape and dtype, see `OwnStages`
        for path in (path for part in parts for path in part.modules):
            container, _, name = path.rpartition(".")
            if container and container not in self._modules:
                self.add_module(container, nn.ModuleDict())
            (self.get_submodule(container) if container else self).add_module(name, model.get_submodule(path))

    def forward(self, x: Tensor, target: Tensor | None = None, later: Later | None = None) -> Tensor:
        """Return the output or the loss. The clock's backward leaves its weight gradients to `later`."""
        if self.clock is not None:
            return self.clock.forward(x, self.output if target is None else None, later)
        if not torch.is_grad_enabled():
            return self._compute(x, target)
        if self.recompute:
            again = partial(same_buffers, self)
            y = checkpoint(self._compute, x, target, use_reentrant=False, context_fn=again)
        else:
            y = self._compute(x, target)
        has_gradient = y.requires_grad or not (y.is_floating_point() or y.is_complex())
        # If no gradient flows through the stage, its backward finds nothing, and is no error.
        return y if has_gradient else y.detach().requires_grad_()

    def _compute(self, x: Tensor, target: Tensor | None) -> Tensor:
        for part in self.parts:
            x = part.forward(self, x)
        if target is not None:
            assert self.loss_of is not None, "only the last stage has a loss"
            # The mean over no target at all is not a number.
            return torch.where(is_valid(target).any(), self.loss_of(x, target), 0)
        # Under torch.autocast the next stage still gets the dtype that it expects.
        return x if self.output is None else x.to(self.output.dtype)

    def output_like(self, x: Tensor, number: int = 0, recompute: bool = False) -> Tensor:
        """Return the shape and dtype of the output, as a tensor on device "meta"; nothing is computed.

        It is a run without numbers, of which the modules keep nothing: no buffer, no attribute. As in
        training, the input requires a gradient, but not that of stage 0. WorkbookError if this does not run.
        """
        held = {name: _like(tensor) for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        before = [(part, vars(part).copy(), part._buffers.copy()) for part in self.modules()]
        try:
            given = torch.empty_like(x, device="meta", requires_grad=number > 0)
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                made = functional_call(self, held, (given,)).detach()
            if recompute and given._version > 0:  # the input of the second forward would be another one
                raise RuntimeError("an in-place operation")
            return made
        except (RuntimeError, ValueError) as error:
            why = reason(error).rstrip(".")
            if "in-place" in why:
                why = "its first layers change it in place, so leave inplace=True out there"
            elif isinstance(error, NotImplementedError) or "meta tensors" in why:
                why = "it asks for numbers, but shapes must be known before there are any"
            raise WorkbookError(
                f"Stage {number} cannot run on an input of shape {tuple(x.shape)} and {x.dtype}: {why}."
            ) from error
        finally:
            for part, attributes, buffers in before:
                for own, kept in ((vars(part), attributes), (part._buffers, buffers)):
                    own.clear()
                    own.update(kept)


def _like(tensor: Tensor) -> Tensor:
    """Return a tensor without memory. Only what counts stays a number, because modules look at it."""
    if tensor.dim() == 0 and not tensor.is_floating_point():
        return tensor.detach().cpu().clone()
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def balanced_stages(
    model: nn.Module | Sequence[nn.Module], stages: int, balance: Balance = "layers"
) -> list[Stage]:
    """Return the model cut into that many stages, of about equally many layers or parameters."""
    model = as_sequential(model)
    parts = parts_of(model)
    ranges = cut(costs_of(model, parts, balance), stages)
    return [Stage(model, [parts[i] for i in of_stage]) for of_stage in ranges]


def costs_of(model: nn.Module, parts: list[ModelPart], balance: Balance) -> list[float]:
    """Return the cost of each part. For an nn.Sequential "layers" means parameters, too."""
    if balance == "layers" and not isinstance(model, nn.Sequential):
        return [float(part.layers) for part in parts]
    modules = ([model.get_submodule(path) for path in part.modules] for part in parts)
    return [float(sum(p.numel() for p in nn.ModuleList(each).parameters())) for each in modules]


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Return the parts of each stage: the most expensive stage is as cheap, and all are as even, as can be.

    Every stage takes at least one part; WorkbookError if there are too few.
    """
    n = len(costs)
    if stages > n:
        raise WorkbookError(
            f"{n} parts cannot be cut into {stages} stages: take fewer ranks or --chunks, or more --layers."
        )
    until = [0.0, *accumulate(costs)]

    def ends_of_first(start: int, stages: int) -> range:
        """Return where the first of so many stages, which begins at `start`, can end."""
        return range(start + 1, n - stages + 2) if stages > 1 else range(n, n + 1)

    @cache
    def least(start: int, stages: int) -> float:
        """Return the smallest cost that the most expensive of the stages from `start` on can have."""
        if stages == 0:
            return 0.0
        ends = ends_of_first(start, stages)
        return min(max(until[end] - until[start], least(end, stages - 1)) for end in ends)

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the smallest sum of squared costs, if none is above `most`, and minus the stages' ends."""
        if stages == 0:
            return 0.0, ()
        found: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for end in ends_of_first(start, stages):
            if (cost := until[end] - until[start]) <= most:
                squares, ends = best(end, stages - 1)
                found.append((cost**2 + squares, (-end, *ends)))
        # Of equal cuts take the last one: a part that costs nothing, such as an activation function, then
        # goes with the part before it.
        return min(found)

    most = least(0, stages)
    ends = [-end for end in best(0, stages)[1]]
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
