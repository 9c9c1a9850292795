"""Test that an all-to-all in flight is differentiated, and that others compute while it travels."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from comm.functions import exchange_shards
from comm.in_flight import InFlightExchange
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks


def test_an_exchange_in_flight_equals_exchange_shards_forward_and_backward():
    def work(cluster: Cluster) -> None:
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

    run_ranks(work, 3)


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
