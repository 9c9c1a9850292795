"""The models of the lessons as chains of parts, which a pipeline divides among its stages.

    [embedding][block 0][block 1][block 2][block 3][norm, head]        a GPT

A part computes with modules of a `stage`, which has them under their names in the full model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from lab.launch.errors import WorkbookError
from lab.models.model import GPT, MLP, BabyCNN


class ModelPart(NamedTuple):
    """Holds a part of the chain: the names of its modules, what it computes, and how many layers it is."""

    modules: tuple[str, ...]
    forward: Callable[[Any, Tensor], Tensor]
    layers: int = 1


def parts_of(model: nn.Module) -> list[ModelPart]:
    """Return the chain of parts of an nn.Sequential, GPT, MLP or BabyCNN. WorkbookError for other models."""
    if type(model).forward is nn.Sequential.forward:
        return [ModelPart((name,), partial(_call, name)) for name, _ in model.named_children()]
    if isinstance(model, GPT):
        blocks = [
            ModelPart((f"blocks.{i}",), partial(_block, f"blocks.{i}")) for i in range(len(model.blocks))
        ]
        before = ModelPart(("token_embedding", "position_embedding", "dropout"), GPT.embed, layers=0)
        return [
            before,
            *blocks,
            ModelPart(("final_norm", "head"), lambda s, x: s.head(s.final_norm(x)), layers=0),
        ]
    if isinstance(model, MLP):
        last = len(model.layers) - 1
        return [
            ModelPart((f"layers.{i}",), partial(_linear, f"layers.{i}", i < last)) for i in range(last + 1)
        ]
    if isinstance(model, BabyCNN):
        return [
            ModelPart(("conv1",), lambda stage, x: F.relu(stage.conv1(x))),
            ModelPart(("conv2",), lambda stage, x: F.max_pool2d(F.relu(stage.conv2(x)), 2).flatten(1)),
            ModelPart(("linear1",), lambda stage, x: F.relu(stage.linear1(x))),
            ModelPart(("linear2",), lambda stage, x: stage.linear2(x)),
        ]
    raise WorkbookError(
        f"A {type(model).__name__} cannot be cut into stages: give an nn.Sequential, or a list of modules "
        "of which each takes what the one before returns."
    )


def _call(path: str, stage: nn.Module, x: Tensor) -> Tensor:
    return stage.get_submodule(path)(x)


def _block(path: str, stage: nn.Module, x: Tensor) -> Tensor:
    # A block adds to its input, and so the shape stays. To find that out, PyTorch would take 20 ms a block.
    return x if x.is_meta else _call(path, stage, x)


def _linear(path: str, is_followed: bool, stage: nn.Module, x: Tensor) -> Tensor:
    x = _call(path, stage, x.flatten(1))
    return F.relu(x) if is_followed else x


def as_sequential(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a list of modules as the nn.Sequential of them, and a module as it is."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    return nn.Sequential(*model)
