"""Provide what programs do to the gradients of a model between two backwards."""

from collections.abc import Callable
from typing import Any

from torch import nn

Change = Callable[[nn.Module], Any]


def set_to_none(model: nn.Module) -> None:
    model.zero_grad()


def zeroed_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def halved(model: nn.Module) -> None:
    """Halve all gradients in place, as clipping does."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
