"""Provide small models, and an input, for tests of how wrappers and optimizers are used."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.data_parallel.equivalence import mean_square

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    mean_square(model, x).backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    optimizer.step()


class WithoutWeight(torch.autograd.Function):
    """A function whose backward returns no gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return 2 * dy, None


class HasNone(nn.Module):
    leaves_unused = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers, self.weight = layers(seed), nn.Parameter(torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return WithoutWeight.apply(self.layers(x), self.weight)


class Middle(nn.Module):
    """A product of three parameters and the input; the one in the middle may be left out."""

    leaves_unused = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Parameter(torch.ones(1).double()) for _ in range(3))

    def forward(self, x: Tensor, uses_middle: bool) -> Tensor:
        y = x * self.first
        return (y * self.middle if uses_middle else y) * self.last


class Complex(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(seed)).double()
        self.weight = nn.Parameter(torch.view_as_complex(numbers))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight.t()).abs()
