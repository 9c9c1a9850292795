"""A model is a chain of parts, and a stage is a run of consecutive parts.

      GPT    [embedding][block 0][block 1][block 2][block 3][norm, head]
      stages |-------- 0 --------|-- 1 ---|-- 2 ---|---------- 3 -------|

The parts of an nn.Sequential are its modules. A stage keeps its modules under the names that they have in
the full model, so checkpoints, gradients and comparisons find its parameters under the same names.

Which parts a stage takes is decided in split.py.

GPT's tied embedding is a parameter of the first and of the last stage. Two ranks hold a copy each; the copies
start equal and get the sum of both gradients. No shapes are typed in: once, at the start, every stage runs on
tensors without memory (device "meta"), and so the next stage knows what it will receive.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, BabyCNN


class Part(NamedTuple):
    """Holds one part of the chain: the names of its modules, what it computes, and its cost for the cut."""

    modules: tuple[str, ...]
    forward: Callable[["Stage", Tensor], Tensor]
    cost: float = 1.0


class Stage(nn.Module):
    """Runs consecutive parts of `model`, one after the other. It shares the modules with the model."""

    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self._parts = parts
        self.config = getattr(model, "config", None)
        for path in (path for part in parts for path in part.modules):
            container, _, name = path.rpartition(".")
            if container and container not in self._modules:
                self.add_module(container, nn.ModuleDict())
            (self.get_submodule(container) if container else self).add_module(name, model.get_submodule(path))
        first = [module for path in parts[0].modules for module in model.get_submodule(path).modules()]
        self._copies_input = any(getattr(module, "inplace", False) for module in first)

    def forward(self, x: Tensor) -> Tensor:
        if self._copies_input:  # autograd allows no change in place of a received tensor
            x = x.clone()
        for part in self._parts:
            x = part.forward(self, x)
        return x

    def output_like(self, x: Tensor) -> Tensor:
        """Return the shape and dtype of the output, as a tensor on device "meta"; nothing is computed."""
        held = {name: tensor.to("meta") for name, tensor in self._everything()}
        with torch.no_grad():
            return functional_call(self, held, (x.to("meta"),))

    def _everything(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]


def as_sequential(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a list of modules as the nn.Sequential of them, and a module as it is."""
    if not isinstance(model, list | tuple | nn.ModuleList):
        return model  # type: ignore[return-value]
    for module in model:
        if not isinstance(module, nn.Module):
            raise WorkbookError(f"A pipeline takes a list of nn.Modules, and this one holds {module!r}.")
    return nn.Sequential(*model)


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
    raise WorkbookError(
        f"A {type(model).__name__} cannot be cut into stages: give an nn.Sequential, or a list of modules "
        "of which each takes what the one before returns."
    )


def num_parameters(*modules: nn.Module) -> int:
    """Return how many numbers the modules' parameters have; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def _call(path: str, stage: Stage, x: Tensor) -> Tensor:
    return stage.get_submodule(path)(x)


def _linear(path: str, is_followed: bool, stage: Stage, x: Tensor) -> Tensor:
    x = _call(path, stage, x.flatten(1))
    return F.relu(x) if is_followed else x


def _head(stage: Stage, x_btd: Tensor) -> Tensor:
    return stage.head(stage.final_norm(x_btd))


def ties(stages: Sequence[Stage]) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the parameters that two stages share, as (stage, name) of the earlier and of the later one.

    `stages` are all stages of one model. WorkbookError if more than two share a parameter.
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
