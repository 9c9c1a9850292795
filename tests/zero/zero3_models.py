"""Provide small models and a comparison with one process, for tests of ZeRO stage 3."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lab.check import assert_same
from lab.models.text import rank_slice
from tests.zero.sharded import full_tensors
from zero.train_zero3 import FullyShardedDataParallel

WIDTH = 6


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).double()


def mlp() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


Step = Callable[[nn.Module, Tensor], None]


def backward_of(loss: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    return lambda model, x: loss(model, x).backward()


def compare(cluster, make: Callable[[], nn.Module], step: Step, **options: Any) -> FullyShardedDataParallel:
    """Compare gradients with one process after each of three steps, and return the model."""
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(cluster.rank)
    model = FullyShardedDataParallel(make(), **options)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model))
    for i in range(3):
        for optimizer in (theirs, ours):
            optimizer.zero_grad()
        step(reference, numbers(i))
        step(model, rank_slice(numbers(i), cluster.rank, cluster.world_size))
        model.finish_gradient_sync()
        expected = {name: p.grad for name, p in reference.named_parameters()}
        gradients = full_tensors(model.pieces, lambda piece: piece.tensor.grad)
        assert_same(gradients, expected, what=f"gradient in step {i}, {make.__name__},")
        assert all(unit.full is None for unit in model.units), "a unit stays full"
        for optimizer in (theirs, ours):
            optimizer.step()
    return model


class Nested(nn.Module):
    """A list of lists: the inner lists have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = x + mlp(torch.tanh(attention(x)))
        return x
