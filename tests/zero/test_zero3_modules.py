"""Test that ZeRO stage 3 trains modules of many kinds with the gradients of one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square
from tests.zero.zero3_models import WIDTH, Nested, backward_of, compare, linear, numbers
from zero.train_zero3 import FullyShardedDataParallel


@dataclasses.dataclass(frozen=True)
class Out:
    x: Tensor
    more: dict[str, Any]


class Layer(nn.Module):
    """A block that returns a dataclass and keeps an extra loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Out:
        y = torch.tanh(self.one(x)) if scale is None else self.one(x) * scale
        self.loss = self.other(y).square().mean()
        return Out(x + y, {"layer": [y], "name": "a layer"})


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), linear()

    def forward(self, x: Any, *, scale: Tensor | None = None, mask: None = None) -> dict[str, Any]:
        x = x["x"] if isinstance(x, dict) else x
        for layer in self.layers:
            out = layer(x, scale=scale)
            x = out.x
        return {"y": self.head(x), "all": (out.more["layer"][0], None, 3)}


def test_inputs_and_outputs_may_be_keywords_none_dicts_tuples_and_dataclasses():
    def total(outputs: dict[str, Any]) -> Tensor:
        assert outputs["all"][1:] == (None, 3)
        return outputs["y"].square().mean() + outputs["all"][0].mean()

    def work(cluster) -> None:
        for call in (
            lambda model, x: model(x),
            lambda model, x: model({"x": x}, mask=None),
            lambda model, x: model(x=x, scale=torch.tensor(0.5)),
        ):
            compare(cluster, Layers, lambda model, x, call=call: total(call(model, x)).backward())

    run_ranks(work, 2)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": linear(), "b": nn.Sequential(linear(), nn.Tanh(), linear())})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["b"](self.layers["a"](x))


def deep() -> nn.Module:
    return nn.Sequential(linear(), nn.Sequential(Named(), nn.Tanh(), Named()), nn.Tanh(), linear())


@pytest.mark.parametrize(("make", "blocks"), [(Nested, 4), (Named, 2), (deep, 4)])
def test_blocks_are_found_in_containers_of_every_kind(make: Callable[[], nn.Module], blocks: int):
    def work(cluster) -> None:
        model = compare(cluster, make, backward_of(mean_square))
        assert len(model.blocks) == blocks
        assert not model.root.units

    run_ranks(work, 2)


class Around(nn.Module):
    """A model that bypasses a block's hooks: it calls `forward` and uses the block's weights and losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.seen = nn.ModuleList(Layer() for _ in range(3)), []
        self.layers[1].other.register_forward_hook(lambda *args: self.seen.append(args[-1]))

    def forward(self, x: Tensor) -> Tensor:
        early = self.layers[1].one.weight.square().sum()
        for i, layer in enumerate(self.layers):
            x = (layer.forward if i == 0 else layer)(x).x
        late = sum(p.abs().sum() for p in self.layers[2].parameters())
        return x.square().mean() + 0.1 * early + 0.01 * late + self.layers[0].loss

    def aside(self) -> Tensor:
        return self.layers[2].loss + self.seen.pop().mean()


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def test_parameters_used_outside_of_their_blocks_forward_are_gathered_on_use():
    def both(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) + inner(model).aside()

    def aside_only(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        return inner(model).aside()

    def work(cluster) -> None:
        for options in ({}, {"reshard_after_forward": False}):
            compare(cluster, Around, backward_of(both), **options)
            compare(cluster, Around, backward_of(aside_only), **options)

    run_ranks(work, 2)


class Half(torch.autograd.Function):
    """Halve the first input; the second one gets no gradient."""

    forward = staticmethod(lambda ctx, x, w: x / 2)
    backward = staticmethod(lambda ctx, g: (g / 2, None))


class Odd(nn.Module):
    """A weight without a gradient, one with a sparse gradient, and a frozen layer below a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.words = nn.Parameter(torch.ones(3)), nn.Embedding(5, WIDTH, sparse=True).double()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2))
        self.first = linear()
        for layer in self.layers:
            layer[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.words((x[:, 0] > 0).long())
        for layer in self.layers:
            x = layer(x)
        return Half.apply(x, self.none)


def test_gradients_may_be_absent_or_sparse_and_frozen_layers_pass_them_on():
    def dense(model: nn.Module, x: Tensor) -> None:
        mean_square(model, x).backward()
        if isinstance(model, Odd):
            model.words.weight.grad = model.words.weight.grad.to_dense()

    def work(cluster) -> None:
        compare(cluster, Odd, dense)

    run_ranks(work, 2)


def test_parameters_can_be_frozen_and_unfrozen_between_steps():
    def work(cluster) -> None:
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Sequential(linear(), nn.Tanh(), linear()))
        frozen = [p for name, p in model.named_parameters() if name.startswith("0")]
        for requires_grad in (False, True):
            for parameter in frozen:
                parameter.requires_grad_(requires_grad)
            model.zero_grad()
            mean_square(model, numbers()).backward()
            model.finish_gradient_sync()
            assert all((parameter.grad is not None) == requires_grad for parameter in frozen)

    run_ranks(work, 2)
