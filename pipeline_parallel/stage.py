"""Stages: a model as a chain of parts, cut into stretches that ranks hold one or several of.

      GPT    [embedding][block 0][block 1][block 2][block 3][norm, head]
      stages |-------- 0 --------|-- 1 ---|-- 2 ---|---------- 3 -------|

A stage keeps its modules under the names that they have in the whole model, so its parameters are found
under them in checkpoints, gradients and comparisons. A cut minimises the largest stage, for the slowest one
sets the pace of all: by the number of layers, or by the seconds that they take here.

GPT's tied embedding is the first stage's and the last one's: two copies on two ranks, which start equal and
get the sum of both gradients. Nobody types in shapes: once, at the start, every stage is run on tensors
without memory (device "meta") and tells the next one what it will get.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lab.errors import WorkbookError
from lab.model import GPT, MLP, BabyCNN
from lab.stream_clock import time_when_done


class Part(NamedTuple):
    """A link of the chain: the modules that it takes, what it does, and how much it counts in an even cut."""

    modules: tuple[str, ...]
    forward: Callable[["Stage", Tensor], Tensor]
    cost: float = 1.0


class Stage(nn.Module):
    """Consecutive parts of `model`, which it shares the modules with. The input of the first to the output
    of the last."""

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = parts
        self.config = getattr(model, "config", None)
        for path in (path for part in parts for path in part.modules):
            container, _, name = path.rpartition(".")
            if container and container not in self._modules:
                self.add_module(container, nn.ModuleDict())
            (self.get_submodule(container) if container else self).add_module(name, model.get_submodule(path))

    def forward(self, x: Tensor) -> Tensor:
        for part in self._parts:
            x = part.forward(self, x)
        return x

    def output_like(self, x: Tensor) -> Tensor:
        """The shape and dtype of the output, as a tensor on device "meta"; nothing is computed."""
        held = {name: tensor.to("meta") for name, tensor in self._everything()}
        with torch.no_grad():
            return functional_call(self, held, (x.to("meta"),))

    def _everything(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]


def parts_of(model: nn.Module) -> list[Part]:
    """The chain of a GPT, MLP or BabyCNN. WorkbookError for other models."""
    if isinstance(model, GPT):
        blocks = [Part((f"blocks.{i}",), partial(_call, f"blocks.{i}")) for i in range(len(model.blocks))]
        # In an even cut blocks count; what comes before and after them goes along.
        before = Part(("token_embedding", "position_embedding", "dropout"), GPT.embed, cost=0.0)
        return [before, *blocks, Part(("final_norm", "head"), _head, cost=0.0)]
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
    raise WorkbookError(f"a {type(model).__name__} cannot be cut into stages: give parts_of() its chain.")


def _call(path: str, stage: Stage, x: Tensor) -> Tensor:
    return stage.get_submodule(path)(x)


def _linear(path: str, is_followed: bool, stage: Stage, x: Tensor) -> Tensor:
    x = _call(path, stage, x.flatten(1))
    return F.relu(x) if is_followed else x


def _head(stage: Stage, x_btd: Tensor) -> Tensor:
    return stage.head(stage.final_norm(x_btd))


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Which parts each stage takes, so that the most expensive stage is as cheap as can be, the rest even.

    Every stage takes one part at least; WorkbookError if there are too few.
    """
    n = len(costs)
    if stages > n:
        raise WorkbookError(
            f"{n} parts cannot be cut into {stages} stages: take fewer ranks or chunks, or more layers."
        )
    until = [0.0, *accumulate(costs)]

    @cache
    def best(start: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """The largest stage, the sum of squares, and the ends of the stages from part `start` on."""
        found = []
        for end in range(start + 1, n - stages + 2) if stages > 1 else [n]:
            cost = until[end] - until[start]
            largest, squares, ends = best(end, stages - 1) if stages > 1 else (0.0, 0.0, ())
            found.append((max(cost, largest), cost**2 + squares, (end, *ends)))
        return min(found)

    ends = best(0, stages)[2]
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def measured_costs(model: nn.Module, x: Tensor, repeats: int = 5) -> list[float]:
    """Median seconds of each part's forward and backward here, on the microbatch `x`.

    Ranks must cut alike: measure on one, and tell the others.
    """
    costs = []
    for part in parts_of(model):
        stage, seconds = Stage(model, [part]), []
        for _ in range(repeats + 1):
            inputs = x.detach().requires_grad_(x.is_floating_point())
            start = time_when_done(x.device)
            y = stage(inputs)
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            seconds.append((time_when_done(x.device) - start) / 1e9)
        costs.append(statistics.median(seconds[1:]))
        x = y.detach()
    model.zero_grad()
    return costs


def ties(stages: Sequence[Stage]) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Parameters that two stages share: (stage, name) of the earlier and of the later one.

    `stages` are all of the model's, cut from the same one. WorkbookError if more than two share one.
    """
    holders: dict[int, list[tuple[int, str]]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            holders.setdefault(id(parameter), []).append((index, name))
    for held in holders.values():
        if len(held) > 2:
            names = ", ".join(f"{name} of stage {index}" for index, name in held)
            raise WorkbookError(f"{names} are one parameter; two stages can share one, not {len(held)}.")
    return [(held[0], held[1]) for held in holders.values() if len(held) == 2]
