"""Test that ZeRO stage 3 trains in loops of many kinds with the gradients of one process."""

import contextlib
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.check import assert_same
from lab.models.text import rank_slice
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import mean_square
from tests.zero.sharded import full_tensors
from tests.zero.zero3_models import WIDTH, Nested, backward_of, compare, linear, numbers
from zero.train_zero3 import FullyShardedDataParallel


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
    """The generator's backward adds to the discriminator's gradients, which zero_grad() clears."""

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
            parameters = full_tensors(ours.pieces, lambda piece: piece.tensor)
            assert_same(parameters, dict(theirs.named_parameters()), what="parameter")

    run_ranks(work, 2)


class Recomputed(Nested):
    """A model with both kinds of activation checkpoint, and an LSTM, which keeps a list of its weights."""

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
            step(m, numbers())  # the same examples on all ranks, since bfloat16 rounds other sums differently
        model.finish_gradient_sync()
        expected = {name: p.grad for name, p in reference.named_parameters()}
        assert_same(full_tensors(model.pieces, lambda piece: piece.tensor.grad), expected, rtol=1e-6)

    run_ranks(work, 2)
