"""Test that every wrapper's replicas have the gradients that one process gets from the global batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import (
    OURS,
    WRAPPERS,
    EitherWay,
    Odd,
    X,
    compare_with_one_process,
    examples,
    gpt,
    layers,
    mean_gradients,
    mean_square,
    mine,
    no_sync,
    odd_loss,
    one_process,
    text,
    text_loss,
)


class Middle(nn.Module):
    """A product of three parameters and the input; the one in the middle may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Parameter(torch.ones(1).double()) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_middle: bool) -> torch.Tensor:
        y = x * self.first
        return (y * self.middle if uses_middle else y) * self.last


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_and_parameters_equal_one_process(world_size: int):
    def compare(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            odd = examples(world_size)
            compare_with_one_process(cluster, wrap, Odd, odd_loss, odd, (3, 1), f"{name}, Odd")
            if world_size == 3:
                compare_with_one_process(cluster, wrap, gpt, text_loss, text(), (2,), f"{name}, GPT")

    run_ranks(compare, world_size)


def test_a_gradient_is_the_mean_over_ranks_and_not_their_sum():
    def work(cluster: Cluster) -> None:
        for name, wrap in WRAPPERS.items():
            model = wrap(nn.Linear(3, 2, bias=False))
            model(torch.ones(1, 3) * (cluster.rank + 1)).sum().backward()
            model.finish_gradient_sync()
            mean = torch.full((2, 3), 2.0)  # of 1, 2 and 3
            assert_same(mean_gradients(model.module), {"weight": mean}, what=f"gradient of {name}")

            half = wrap(nn.Linear(1, 1, bias=False).half())
            half(torch.full((1, 1), 40000.0).half()).sum().backward()  # the sum would overflow
            half.finish_gradient_sync()
            mean = torch.full((1, 1), 40000.0).half()
            assert_same(mean_gradients(half.module), {"weight": mean}, 2**-9, f"gradient of {name}")

    run_ranks(work, 3)


def test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros():
    """Gradients wait for those before them in the order, so one that no hook announces holds others up."""
    users_and_mean = {"both": 15.0, "none": 0.0, "rank 0": 5.0, "rank 1": 10.0}  # of the middle's gradient

    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(Middle())
            with torch.no_grad():
                model.module.first.fill_(5.0)
                model.module.last.fill_(2.0)
            for users, middle in users_and_mean.items():
                model.zero_grad()
                uses_middle = users in ("both", f"rank {cluster.rank}")
                model(torch.full((1,), cluster.rank + 1.0).double(), uses_middle).backward()
                model.finish_gradient_sync()
                expected = {"first": 3.0, "middle": middle, "last": 7.5}
                expected = {key: torch.tensor([value]) for key, value in expected.items()}
                assert_same(
                    gradients(model.module), expected, what=f"{name}: used by {users}, the gradient of"
                )

    run_ranks(work, 2, timeout=20)


def test_a_gradient_that_only_an_earlier_microbatch_has_is_averaged_too():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model, x = wrap(Middle()), torch.ones(1).double()
            with no_sync(model):
                model(x, cluster.rank == 1).backward()
            model(x, False).backward()
            model.finish_gradient_sync()
            found = {key: p.grad.item() for key, p in model.module.named_parameters()}
            assert found == {"first": 2.0, "middle": 0.5, "last": 2.0}, name

    run_ranks(work, 2)


def test_hooks_on_one_rank_may_fire_in_another_order():
    def work(cluster: Cluster) -> None:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).double()
        expected = one_process(EitherWay(0, False), lambda m: mean_square(m, x))
        for name, wrap in WRAPPERS.items():
            model = wrap(EitherWay(cluster.rank, backwards=cluster.rank == 0))
            for step in range(2):
                model.zero_grad()
                mean_square(model, *mine(cluster, (x,))).backward()
                model.finish_gradient_sync()
                assert_same(mean_gradients(model.module), expected, what=f"gradient of {name}, step {step},")

    run_ranks(work, 3, timeout=20)


def test_two_forwards_before_one_backward_and_several_backwards_in_one_no_sync_add_up():
    def work(cluster: Cluster) -> None:
        (x,) = mine(cluster, (X,))
        expected = one_process(layers(), lambda model: (model(X) * model(2 * X)).mean())
        thrice = one_process(layers(), lambda model: 3 * mean_square(model, X))
        for name, wrap in WRAPPERS.items():
            model = wrap(layers(cluster.rank))
            (model(x) * model(2 * x)).mean().backward()
            model.finish_gradient_sync()
            assert_same(mean_gradients(model.module), expected, what=f"gradient of two forwards, {name},")
            model.zero_grad()
            with no_sync(model):
                for _ in range(2):
                    mean_square(model, x).backward()
            mean_square(model, x).backward()
            model.finish_gradient_sync()
            assert_same(mean_gradients(model.module), thrice, what=f"gradient of three backwards, {name},")

    run_ranks(work, 2)


def test_gradients_are_averaged_within_the_given_group_only():
    def work(cluster: Cluster) -> None:
        group = dist.new_group([1, 3])
        if cluster.rank in (0, 2):
            return
        for name, wrap in WRAPPERS.items():
            torch.manual_seed(cluster.rank)
            model = wrap(nn.Linear(3, 2, bias=False), group)
            torch.manual_seed(1)
            assert torch.equal(model.module.weight, nn.Linear(3, 2, bias=False).weight), name  # rank 1's
            model(torch.ones(1, 3) * cluster.rank).sum().backward()
            model.finish_gradient_sync()
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), 2.0)), name  # of 1 and 3

    run_ranks(work, 4, timeout=20)


def test_a_module_may_have_no_trained_parameters():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            frozen = wrap(nn.Linear(2, 2).requires_grad_(False))
            frozen(torch.ones(1, 2))
            frozen.finish_gradient_sync()
            assert frozen.module.weight.grad is None, name

    run_ranks(work, 2)
