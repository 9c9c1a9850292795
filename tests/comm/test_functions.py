"""Compare the differentiable collectives with autograd on one process, which has every rank's tensors.

On one process the ranks' inputs are leaves of one graph, and the loss is the sum of what each rank computes
from its output. If all ranks compute the same from the same output, it counts once.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from comm.errors import CommError
from comm.functions import (
    broadcast_from_root,
    copy_to_ranks,
    exchange_shards,
    gather_from_ranks,
    gather_to_root,
    gather_tokens,
    own_shard,
    scatter_from_root,
    scatter_sums,
    split_to_ranks,
    sum_over_ranks,
    sum_to_each_rank,
    sum_to_root,
)
from comm.in_flight import InFlightExchange
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.on_ranks import on_ranks

DIMS = (0, 1, -1)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def compare(
    cluster: Cluster,
    ours: Callable[[Tensor], Tensor],
    on_one_process: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    is_same_input: bool = False,
    counts_once: bool = False,
    what: str = "",
) -> None:
    """Compare this rank's output and its input's gradient with those that one process finds.

    `on_one_process` makes all ranks' outputs from all ranks' inputs.
    """
    me, n = cluster.rank, cluster.world_size
    leaves = [x.clone().requires_grad_() for x in inputs]
    if is_same_input:
        leaves = [leaves[0]] * n
    expected = on_one_process(leaves)
    # What a rank computes from its output: a sum with weights of its own, or with the same as all others.
    weights = [numbers(20 + (0 if counts_once else r), *y.shape) for r, y in enumerate(expected)]
    losses = [(y * weight).sum() for y, weight in zip(expected, weights, strict=True)]
    (losses[0] if counts_once else sum(losses)).backward()

    x = leaves[me].detach().clone().requires_grad_()
    y = ours(x)
    (y * weights[me]).sum().backward()
    assert_same({"y": y.detach()}, {"y": expected[me].detach()}, what=f"output of {what}")
    grad = torch.zeros_like(x) if leaves[me].grad is None else leaves[me].grad
    assert_same({"x": x.grad}, {"x": grad}, what=f"gradient of {what}")


def compare_all(cluster: Cluster) -> None:
    """Compare all twelve functions, along any dim, with any root."""
    n = cluster.world_size
    for dim in DIMS:
        uneven, even, short = [5, 7, 6], [3, 5, 7], [3, 5, 7]
        uneven[dim], even[dim], short[dim] = 4 * n + 1, 2 * n, 2
        alike = [numbers(rank, *even) for rank in range(n)]  # a full tensor of each rank
        shards = [numbers(rank, *short) for rank in range(n)]

        def check(ours: Any, single: Any, inputs: list[Tensor], *args: Any, **options: Any) -> None:
            what = f"{ours.__name__}{args}"
            compare(cluster, lambda x: ours(x, *args), single, inputs, what=what, **options)

        for root in range(n):

            def only_root(full: Tensor, root: int = root) -> list[Tensor]:
                return [full if rank == root else torch.zeros_like(full) for rank in range(n)]

            check(broadcast_from_root, lambda xs: [xs[root]] * n, alike, root)
            check(sum_to_root, lambda xs: only_root(sum(xs)), alike, root)
            check(scatter_from_root, lambda xs: list(xs[root].tensor_split(n, dim)), alike, dim, root)
            check(gather_to_root, lambda xs: only_root(torch.cat(xs, dim)), shards, dim, root)
        check(gather_tokens, lambda xs: [torch.cat(xs, dim)] * n, shards, dim)
        check(scatter_sums, lambda xs: list(sum(xs).tensor_split(n, dim)), alike, dim)
        check(sum_to_each_rank, lambda xs: [sum(xs)] * n, alike)

        def exchanged(xs: list[Tensor]) -> list[Tensor]:
            return [torch.cat([x.tensor_split(n, dim)[rank] for x in xs], dim) for rank in range(n)]

        check(exchange_shards, exchanged, alike, dim)

        # The same loss on all ranks counts once.
        check(sum_over_ranks, lambda xs: [sum(xs)] * n, alike, counts_once=True)
        parts = list(numbers(7, *uneven).tensor_split(n, dim))
        check(
            gather_from_ranks,
            lambda xs: [torch.cat(xs, dim)] * n,
            parts,
            dim,
            None,
            4 * n + 1,
            counts_once=True,
        )

        # The same input on all ranks has one gradient, which every rank finds.
        same = [numbers(7, *uneven)] * n
        check(copy_to_ranks, lambda xs: xs, same, is_same_input=True)
        check(split_to_ranks, lambda xs: list(xs[0].tensor_split(n, dim)), same, dim, is_same_input=True)


@pytest.mark.parametrize("n", [1, 3])
def test_each_pair_is_what_autograd_finds_on_one_process(n: int):
    run_ranks(compare_all, n)


@on_ranks(3)
def test_shards_of_any_size_are_exchanged(cluster: Cluster):
    me, n = cluster.rank, cluster.world_size
    for dim in (0, 1, -1):
        # Rank r sends (r + 2 p) % 4 rows to rank p: some none at all.
        sizes = [[(rank + 2 * peer) % 4 for peer in range(n)] for rank in range(n)]
        shapes = [[3, 5, 7] for _ in range(n)]
        for rank in range(n):
            shapes[rank][dim] = sum(sizes[rank])
        inputs = [numbers(rank, *shape) for rank, shape in enumerate(shapes)]

        def exchanged(xs: list[Tensor], dim: int = dim, sizes: list[list[int]] = sizes) -> list[Tensor]:
            cut = [x.split(own, dim) for x, own in zip(xs, sizes, strict=True)]
            return [torch.cat([of_rank[rank] for of_rank in cut], dim) for rank in range(n)]

        received = [sizes[rank][me] for rank in range(n)]
        compare(cluster, lambda x: exchange_shards(x, dim, None, sizes[me], received), exchanged, inputs)


def test_the_conjugate_of_a_broadcast_is_a_sum_and_that_of_a_sum_a_broadcast():
    def work(cluster: Cluster) -> list[tuple[float, float]]:
        found = []
        for function in (broadcast_from_root, sum_to_root):
            x = torch.tensor(1.0 + cluster.rank, requires_grad=True)
            y = function(x, 1)
            y.backward(torch.tensor(10.0**cluster.rank))
            found.append((y.item(), x.grad.item()))
        return found

    assert run_ranks(work, 3) == [[(2, 0), (0, 10)], [(2, 111), (6, 10)], [(2, 0), (0, 10)]]


def test_the_backward_of_a_sum_is_the_identity_and_that_of_a_copy_a_sum():
    def look(cluster: Cluster) -> list[tuple[float, float]]:
        found = []
        for function in (sum_over_ranks, copy_to_ranks):
            x = torch.tensor(1.0 + cluster.rank, requires_grad=True)
            y = function(x)
            y.backward(torch.tensor(10.0**cluster.rank))
            found.append((y.item(), x.grad.item()))
        return found

    assert run_ranks(look, 3) == [[(6, 10.0**rank), (1.0 + rank, 111)] for rank in range(3)]


def all_functions() -> list[Callable[[Tensor], Tensor]]:
    return [
        copy_to_ranks,
        sum_over_ranks,
        sum_to_each_rank,
        broadcast_from_root,
        sum_to_root,
        lambda x: gather_from_ranks(x, 0),
        lambda x: split_to_ranks(x, 0),
        lambda x: gather_tokens(x, 0),
        lambda x: scatter_sums(x, 0),
        lambda x: scatter_from_root(x, 0),
        lambda x: gather_to_root(x, 0),
        lambda x: exchange_shards(x, 0),
    ]


@on_ranks(2)
def test_inputs_outputs_and_gradients_are_left_as_they_were(cluster: Cluster):
    for function in all_functions():
        x = numbers(cluster.rank, 4, 3).requires_grad_()
        y = function(x * 1.0)
        # A square needs its input in the backward: autograd complains if that was written to.
        z = y.square()
        grad = numbers(5, *z.shape)
        given = grad.clone()
        z.backward(grad)
        assert torch.equal(x, numbers(cluster.rank, 4, 3)) and torch.equal(grad, given)
        assert torch.equal(z, y.square())


@on_ranks(2)
def test_gradients_and_inputs_may_lie_in_memory_in_any_order(cluster: Cluster):
    x = numbers(0, 4, 6).t().requires_grad_()
    y = sum_over_ranks(copy_to_ranks(x))
    y.backward(torch.ones(()).double().expand(6, 4))
    assert_same({"y": y.detach(), "x": x.grad}, {"y": 2 * x.detach(), "x": torch.full((6, 4), 2.0)})
    for function in all_functions():
        found = []
        for transposed in (True, False):
            x = numbers(cluster.rank, 4, 6).t()
            x = (x if transposed else x.contiguous()).requires_grad_()
            y = function(x)
            y.backward(torch.ones(()).double().expand(y.shape))
            found.append({"x": x.grad, "y": y.detach()})
        assert_same(*found)


@on_ranks(3)
def test_shards_are_as_tensor_split_cuts_them_and_others_are_refused(cluster: Cluster):
    x = numbers(0, 7, 5)
    for dim in (0, 1, -1):
        assert torch.equal(own_shard(x, dim, None), x.tensor_split(3, dim)[cluster.rank])
    with pytest.raises(CommError, match=r"has size 1 along dim 0, but its part of 7 has size [23] \(see"):
        gather_from_ranks(x[:1], 0, size=7)
    for function in (scatter_sums, scatter_from_root, exchange_shards):
        with pytest.raises(
            CommError, match="a size of 7 along dim 0 cannot be divided equally among 3 ranks"
        ):
            function(x, 0)


@on_ranks(3)
def test_an_exchange_in_flight_equals_exchange_shards_forward_and_backward(cluster: Cluster):
    n, rank = cluster.world_size, cluster.rank
    sent = [rank + to for to in range(n)]
    received = [by + rank for by in range(n)]
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(sent), 3, generator=random).double()
    factor = torch.randn(sum(received), 3, generator=random).double()
    results: list[dict[str, Tensor | None]] = []
    for exchanged in (
        lambda x: exchange_shards(x, 0, None, sent, received),
        lambda x: InFlightExchange(x, sent, received).wait(),
    ):
        leaf = x.clone().requires_grad_()
        y = exchanged(leaf.sin())
        (y * factor).sum().backward()
        results.append({"y": y.detach(), "x": leaf.grad})
    assert_same(results[1], results[0], 0, f"gradient on {n} ranks")
    with torch.no_grad():
        assert torch.equal(InFlightExchange(x.sin(), sent, received).wait(), results[0]["y"])


def test_what_stands_between_start_and_wait_is_computed_while_it_travels():
    events: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            events.append("compute")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append("compute")
            return 2 * grad

    def noting(name: str):
        method = getattr(InFlightExchange, name)
        return lambda *args, **options: (events.append(name), method(*args, **options))[1]

    def work(cluster: Cluster) -> None:
        with (
            mock.patch.object(InFlightExchange, "launch", noting("launch")),
            mock.patch.object(InFlightExchange, "land", noting("land")),
        ):
            x = torch.randn(4, 3, requires_grad=True)
            travelling = InFlightExchange(x.sin(), [2, 2], [2, 2])
            meanwhile = Noted.apply(x)
            y = travelling.wait().cos() + meanwhile
            assert events == ["launch", "compute", "land"]
            events.clear()
            y.sum().backward()
            assert events == ["launch", "compute", "land"]

    run_ranks(work, 2)
