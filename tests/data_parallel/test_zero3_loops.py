"""Stage 3 trains what DDP trains: modules and loops of every kind, gradients equal to one process."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_parallel.train_zero3 import FullyShardedDataParallel
from lab.check import assert_same
from lab.ranks import run_ranks
from lab.text import rank_slice
from tests.data_parallel.sharded import whole

WIDTH = 6


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH).double()


Step = Callable[[nn.Module, Tensor], None]


def backward_of(loss: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    return lambda model, x: loss(model, x).backward()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def compare(cluster, make: Callable[[], nn.Module], step: Step, **options: Any) -> FullyShardedDataParallel:
    """Return the gradients after each of three steps with rank 0's initial weights."""
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
        gradients = whole(model.pieces, lambda piece: piece.tensor.grad)
        assert_same(gradients, expected, what=f"gradient in step {i}, {make.__name__},")
        assert all(unit.full is None for unit in model.units), "a unit stays full"
        for optimizer in (theirs, ours):
            optimizer.step()
    return model


@dataclasses.dataclass(frozen=True)
class Out:
    x: Tensor
    more: dict[str, Any]


class Layer(nn.Module):
    """A block that returns a dataclass; its loss of its own is an attribute."""

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


class Nested(nn.Module):
    """Lists in a list: blocks that have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = x + mlp(torch.tanh(attention(x)))
        return x


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
    """Every way around a block's hooks: its forward by name, its weights in other hands, losses aside."""

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


def test_what_goes_around_a_blocks_hooks_is_gathered_when_it_is_touched():
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


def several_backwards(model: nn.Module, x: Tensor) -> None:
    with model.no_sync() if isinstance(model, FullyShardedDataParallel) else contextlib.nullcontext():
        for _ in range(2):
            mean_square(model, x).backward()
    mean_square(model, 2 * x).backward()


def two_forwards_one_backward(model: nn.Module, x: Tensor) -> None:
    (mean_square(model, x) + model(2 * x).sin().mean()).backward()


def two_forwards_two_backwards(model: nn.Module, x: Tensor) -> None:
    first, second = mean_square(model, x), mean_square(model, 2 * x)
    with torch.no_grad():
        model(3 * x)
    first.backward()
    second.backward()


def one_graph_twice(model: nn.Module, x: Tensor) -> None:
    loss = mean_square(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def penalty_of_the_gradient(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    (mean_square(model, x) + (gradient.norm(dim=1) - 1).square().mean()).backward()


def evaluated_with_a_graph(model: nn.Module, x: Tensor) -> None:
    mean_square(model, x).backward()
    if isinstance(model, FullyShardedDataParallel):
        model.finish_gradient_sync()
        model(x)


def cleared_in_between(model: nn.Module, x: Tensor) -> None:
    mean_square(model, x).backward()
    for parameter in model.parameters():
        parameter.grad = None
    mean_square(model, 2 * x).backward()
    model.zero_grad(set_to_none=False)
    mean_square(model, 3 * x).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2
    mean_square(model, 4 * x).backward()


LOOPS = [
    several_backwards,
    two_forwards_one_backward,
    two_forwards_two_backwards,
    one_graph_twice,
    penalty_of_the_gradient,
    evaluated_with_a_graph,
    cleared_in_between,
]


def test_forwards_and_backwards_may_come_in_any_number_and_order():
    def work(cluster) -> None:
        for step in LOOPS:
            compare(cluster, Nested, step)
            compare(cluster, linear, step)

    run_ranks(work, 2)


def test_a_gan_learns_as_in_one_process():
    """The generator's backward leaves gradients in the discriminator, which its zero_grad() clears."""

    def train(wrap: Callable[[nn.Module], nn.Module], z: Tensor, real: Tensor) -> list[nn.Module]:
        torch.manual_seed(0)
        models = [wrap(nn.Sequential(linear(), nn.Tanh(), linear())) for _ in range(2)]
        g, d = models
        og, od = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
        finish = lambda model: wrap is FullyShardedDataParallel and model.finish_gradient_sync()  # noqa: E731
        for _ in range(3):
            od.zero_grad()
            (F.softplus(-d(real)).mean() + F.softplus(d(g(z).detach())).mean()).backward()
            finish(d)
            od.step()
            og.zero_grad()
            F.softplus(-d(g(z))).mean().backward()
            finish(g)
            og.step()
        return models

    def work(cluster) -> None:
        expected = train(lambda module: module, numbers(1), numbers(2))
        mine = (rank_slice(numbers(i), cluster.rank, cluster.world_size) for i in (1, 2))
        for ours, theirs in zip(train(FullyShardedDataParallel, *mine), expected, strict=True):
            parameters = whole(ours.pieces, lambda piece: piece.tensor)
            assert_same(parameters, dict(theirs.named_parameters()), what="parameter")

    run_ranks(work, 2)


class Half(torch.autograd.Function):
    """It has no gradient for its second input."""

    forward = staticmethod(lambda ctx, x, w: x / 2)
    backward = staticmethod(lambda ctx, g: (g / 2, None))


class Odd(nn.Module):
    """A weight without a gradient, a sparse one, and a frozen layer below a trained one in each block."""

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


def test_parameters_frozen_for_a_while_are_left_alone_and_trained_again_later():
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


class Recomputed(Nested):
    """Each kind of checkpoint around blocks, and an LSTM, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[None])[0][0]
        for use_reentrant, layers in zip((True, False), self.layers, strict=True):
            for layer in layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=use_reentrant))
        return x


def recomputed_as_a_whole(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    for use_reentrant in (True, False):
        checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()


def offloaded(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = mean_square(model, x)
    loss.backward()


def test_activations_may_be_recomputed_or_saved_elsewhere():
    def work(cluster) -> None:
        compare(cluster, Recomputed, backward_of(mean_square))
        compare(cluster, Nested, recomputed_as_a_whole)
        compare(cluster, Nested, offloaded)

    run_ranks(work, 2)


def test_autocast_computes_as_in_one_process():
    def step(model: nn.Module, x: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x.float()).float().square().mean()
        loss.backward()

    def single() -> nn.Module:
        return Nested().float()

    def work(cluster) -> None:
        torch.manual_seed(0)
        reference = single()
        model = FullyShardedDataParallel(copy.deepcopy(reference))
        for m in (reference, model):
            step(m, numbers())  # the same examples on all ranks: bfloat16 rounds sums over others differently
        model.finish_gradient_sync()
        expected = {name: p.grad for name, p in reference.named_parameters()}
        assert_same(whole(model.pieces, lambda piece: piece.tensor.grad), expected, rtol=1e-6)

    run_ranks(work, 2)
