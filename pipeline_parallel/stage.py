"""A model is a chain of parts, and a stage is a run of consecutive parts.

      GPT      [embedding][block 0][block 1][block 2][block 3][norm, head]
      stages   |------- 0 --------|-- 1 ---|-- 2 ---|--------- 3 --------|

A stage keeps its modules under the names that they have in the full model, so checkpoints, gradients and
comparisons find its parameters under the same names. Which parts a stage takes is decided by their costs:

      costs   4 1 1 2 2 2        a part costs its number of parameters, the seconds that it takes here,
      cut     4|1 1 2|2 2        or a number that you give; the most expensive stage is as cheap as can be

      split=[1, 3, 2]            or you say how many parts each stage takes

The slowest stage sets the pace of the pipeline: the others wait for its messages.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from comm.collectives import broadcast
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, BabyCNN
from lab.trace.device_clock import DeviceClock
from lab.trace.stream_clock import time_when_done

LossOf = Callable[[Tensor, Tensor], Tensor]
Later = list[Callable[[], None]]
Costs = Sequence[float] | str | None


class Part(NamedTuple):
    """Holds one part of the chain: the names of its modules, what it computes, and its cost for the cut."""

    modules: tuple[str, ...]
    forward: Callable[["Stage", Tensor], Tensor]
    cost: float = 1.0


def parts_of(model: nn.Module) -> list[Part]:
    """Return the chain of parts of an nn.Sequential, GPT, MLP or BabyCNN. WorkbookError for other models."""
    if type(model).forward is nn.Sequential.forward:
        return [
            Part((name,), partial(_call, name), cost=float(num_parameters(module)))
            for name, module in model.named_children()
        ]
    if isinstance(model, GPT):
        blocks = [Part((f"blocks.{i}",), partial(_call, f"blocks.{i}")) for i in range(len(model.blocks))]
        # Blocks count in an even cut; what comes before and after them does not.
        before = Part(("token_embedding", "position_embedding", "dropout"), GPT.embed, cost=0.0)
        return [before, *blocks, Part(("final_norm", "head"), lambda s, x: s.head(s.final_norm(x)), cost=0.0)]
    if isinstance(model, MLP):
        last = len(model.layers) - 1
        return [Part((f"layers.{i}",), partial(_linear, f"layers.{i}", i < last)) for i in range(last + 1)]
    if isinstance(model, BabyCNN):
        return [
            Part(("conv1",), lambda stage, x: F.relu(stage.conv1(x))),
            Part(("conv2",), lambda stage, x: F.max_pool2d(F.relu(stage.conv2(x)), 2).flatten(1)),
            Part(("linear1",), lambda stage, x: F.relu(stage.linear1(x))),
            Part(("linear2",), lambda stage, x: stage.linear2(x)),
        ]
    raise WorkbookError(
        f"A {type(model).__name__} cannot be cut into stages: give an nn.Sequential, or a list of modules "
        "of which each takes what the one before returns."
    )


def num_parameters(*modules: nn.Module) -> int:
    """Return how many numbers the modules' parameters have; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def _call(path: str, stage: "Stage", x: Tensor) -> Tensor:
    return stage.get_submodule(path)(x)  # type: ignore[no-any-return]


def _linear(path: str, is_followed: bool, stage: "Stage", x: Tensor) -> Tensor:
    x = _call(path, stage, x.flatten(1))
    return F.relu(x) if is_followed else x


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
        self.deferring: Callable[[Later], AbstractContextManager[None]] | None = None  # deferred.py
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
        deferring = nullcontext() if later is None or self.deferring is None else self.deferring(later)
        with deferring:
            for part in self.parts:
                x = part.forward(self, x)
        if target is not None:
            assert self.loss_of is not None, "only the last stage has a loss"
            return self.loss_of(x, target)
        # Under torch.autocast the next stage still gets the dtype that it expects.
        return x if self.output is None else x.to(self.output.dtype)

    def output_like(self, x: Tensor) -> Tensor:
        """Return the shape and dtype of the output, as a tensor on device "meta"; nothing is computed."""
        held = {name: tensor.to("meta") for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        with torch.no_grad():
            return functional_call(self, held, (x.to("meta"),))  # type: ignore[no-any-return]


def stages_of(
    model: nn.Module | Sequence[nn.Module],
    stages: int,
    example: Tensor,
    costs: Costs = None,
    split: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Stage]:
    """Return the model cut into that many stages, in the same way on all ranks of `group`.

    The model is cut by `costs`: a number for each part, "parameters", "time", or None for `Part.cost`, by
    which an nn.Sequential is cut by its parameters and a GPT by its blocks. `split` says instead how many
    parts each stage takes.
    """
    model = as_sequential(model)
    parts = parts_of(model)
    if split is not None:
        if len(split) != stages or sum(split) != len(parts) or min(split) < 1:
            raise WorkbookError(
                f"split={list(split)} does not divide the model's {len(parts)} parts into {stages} stages: "
                f"give {stages} numbers of at least 1 whose sum is {len(parts)}."
            )
        ends = list(accumulate(split))
        ranges = [range(end - size, end) for end, size in zip(ends, split, strict=True)]
    else:
        if costs == "time":
            measured = torch.tensor(
                measured_costs(model, example), dtype=torch.float64, device=example.device
            )
            broadcast(measured, root=0, group=group)  # so that all ranks cut the model in the same way
            costs = measured.tolist()
        ranges = cut(costs_of(model, parts, costs), stages)
    return [Stage(model, [parts[i] for i in of_stage]) for of_stage in ranges]


def costs_of(model: nn.Module, parts: list[Part], costs: Costs) -> list[float]:
    """Return the cost of each part: `Part.cost` by default, its number of parameters, or the given number."""
    if costs is None:
        return [part.cost for part in parts]
    if isinstance(costs, str):
        if costs != "parameters":
            raise WorkbookError(f"costs={costs!r} is unknown: give 'parameters', 'time' or numbers.")
        return [float(num_parameters(*map(model.get_submodule, part.modules))) for part in parts]
    if len(costs) != len(parts):
        raise WorkbookError(f"costs has {len(costs)} numbers, and the model has {len(parts)} parts.")
    return list(costs)


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

    @cache
    def best(start: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """Return, for the parts from `start` on, the largest cost of a stage, the sum of squared costs, and
        where each stage ends."""
        found = []
        for end in range(start + 1, n - stages + 2) if stages > 1 else [n]:
            cost = until[end] - until[start]
            largest, squares, ends = best(end, stages - 1) if stages > 1 else (0.0, 0.0, ())
            found.append((max(cost, largest), cost**2 + squares, (end, *ends)))
        # Of equal cuts take the last one: a part that costs nothing, such as an activation function, then
        # goes with the part before it.
        return min(found, key=lambda each: (*each[:2], [-end for end in each[2]]))

    *_, ends = best(0, stages)
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def measured_costs(model: nn.Module, x: Tensor, repeats: int = 5) -> list[float]:
    """Return the median seconds of each part's forward and backward on this device, on the microbatch `x`.

    Gradients, random numbers and buffers are afterwards what they were.
    """
    costs = []
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for part in parts_of(model):
            stage, seconds = Stage(model, [part]), []
            for _ in range(repeats + 1):
                inputs = x.detach().requires_grad_(x.is_floating_point())
                start = time_when_done(x.device)
                y = stage(inputs)
                if y.requires_grad:
                    given = [each for each in (inputs, *stage.parameters()) if each.requires_grad]
                    torch.autograd.grad(y, given, torch.ones_like(y), allow_unused=True)
                seconds.append((time_when_done(x.device) - start) / 1e9)
            costs.append(statistics.median(seconds[1:]))
            x = y.detach()
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    return costs


def as_sequential(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a list of modules as the nn.Sequential of them, and a module as it is."""
    return nn.Sequential(*model) if isinstance(model, list | tuple | nn.ModuleList) else model
