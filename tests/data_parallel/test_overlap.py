"""Test, on the events of a trace, that communication is hidden behind compute."""

import time

import torch
from torch import nn

from comm.cost import Link
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from lab.trace.overlap import overlap_of
from tests.data_parallel.equivalence import OURS, trace_of_a_step
from tests.data_parallel.test_equivalence import Switched


def test_overlap_hides_most_of_its_communication_and_naive_nothing():
    def work(cluster: Cluster) -> dict[str, float | None]:
        names = ("naive", "overlap", "a bucket for each", "ddp")
        return {name: overlap_of(trace_of_a_step(name)).hidden_share for name in names}

    for shares in run_ranks(work, 2):
        assert shares.pop("naive") == 0
        assert all(share > 0.3 for share in shares.values()), shares


def test_a_backward_does_not_wait_for_its_messages():
    def work(cluster: Cluster) -> dict[str, float]:
        seconds = {}
        for name in ("overlap", "a bucket for each"):
            model = OURS[name](nn.Linear(2, 2))
            with slow_link.slowed(Link(0.15, 0.0)):  # an all-reduce between two ranks takes 0.3 seconds
                loss = model(torch.ones(1, 2)).sum()
                start = time.monotonic()
                loss.backward()
                seconds[name] = time.monotonic() - start
                model.finish_gradient_sync()
        return seconds

    for seconds in run_ranks(work, 2):
        assert max(seconds.values()) < 0.3, f"the backwards wait: they take {seconds} seconds"


def test_every_gradient_and_every_bucket_is_launched_while_the_backward_runs():
    def work(cluster: Cluster) -> None:
        for name, launches in (("overlap", 4), ("a bucket for each", 4), ("one bucket", 1), ("ddp", 4)):
            events = trace_of_a_step(name)
            (backward,) = (event for event in events if event.kind == "backward")
            launched = [event.start_ns for event in events if event.kind == "launch"]
            assert len(launched) == launches, name
            assert all(backward.start_ns < moment < backward.end_ns for moment in launched), name

    run_ranks(work, 2)


def test_a_gradient_that_only_an_earlier_microbatch_has_is_averaged_too():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(Switched())
            with model.no_sync():
                model(torch.ones(1, 2), cluster.rank == 1).sum().backward()  # rank 1 uses the layer
            model(torch.ones(1, 2), False).sum().backward()
            model.finish_gradient_sync()
            for layer, mean in ((model.module.always, 2.0), (model.module.sometimes, 0.5)):
                assert torch.equal(layer.weight.grad, torch.full((3, 2), mean)), name

    run_ranks(work, 2)


def test_nothing_is_sent_before_the_last_microbatch():
    def work(cluster: Cluster) -> None:
        for name, wrap in OURS.items():
            model = wrap(nn.Linear(3, 2))
            before = LEDGER.total()
            with model.no_sync():
                model(torch.ones(1, 3)).sum().backward()
                model(torch.ones(1, 3)).sum().backward()
            assert LEDGER.total() == before, name
            model.finish_gradient_sync()
            assert LEDGER.total() != before, name
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), 2.0)), name

    run_ranks(work, 2)
