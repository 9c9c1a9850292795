"""Test, on the events of a trace, that communication is hidden behind compute."""

import torch
from torch import nn

from lab.cluster import Cluster
from lab.ledger import LEDGER
from lab.overlap import overlap_of
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import OURS, trace_of_a_step


def test_overlap_hides_most_of_its_communication_and_naive_nothing():
    def work(cluster: Cluster) -> dict[str, float | None]:
        names = ("naive", "overlap", "a bucket for each", "ddp")
        return {name: overlap_of(trace_of_a_step(name)).hidden_share for name in names}

    for shares in run_ranks(work, 2):
        assert shares.pop("naive") == 0
        assert all(share > 0.3 for share in shares.values()), shares


def test_every_gradient_and_every_bucket_is_launched_while_the_backward_runs():
    def work(cluster: Cluster) -> None:
        for name, launches in (("overlap", 4), ("a bucket for each", 4), ("one bucket", 1), ("ddp", 4)):
            events = trace_of_a_step(name)
            (backward,) = (event for event in events if event.kind == "backward")
            launched = [event.start_ns for event in events if event.kind == "launch"]
            assert len(launched) == launches, name
            assert all(backward.start_ns < moment < backward.end_ns for moment in launched), name

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
