"""Test what is sent and when: communication travels behind computing, and its bytes equal the formula."""

import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from comm.cost import Link
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from lab.trace.overlap import overlap_of
from tests.data_parallel.equivalence import (
    OURS,
    WRAPPERS,
    X,
    accumulate,
    gpt,
    layers,
    mean_gradients,
    mean_square,
    mine,
    no_sync,
    one_process,
    text,
    text_loss,
    trace_of_a_step,
)

OVERLAPPING = ("overlap", "a bucket for each", "one bucket")


def test_a_step_sends_exactly_what_the_formula_says_and_nothing_before_the_last_microbatch():
    wrappers = (
        (NaiveDataParallel, {}),
        (OverlapDataParallel, {}),
        (BucketDataParallel, {"bucket_mb": 0.01}),
    )

    def work(cluster: Cluster) -> None:
        for wrapper, options in wrappers:
            model, (x, y) = wrapper(gpt(cluster.rank), **options), mine(cluster, text())
            before = LEDGER.total()
            with no_sync(model):
                text_loss(model, x, y).backward()
            assert LEDGER.total() == before, wrapper.__name__
            accumulate(model, text_loss, (x, y), 1)
            assert LEDGER.total() - before == model.traffic(), wrapper.__name__

    for world_size in (1, 3):
        run_ranks(work, world_size)


def test_messages_are_launched_in_the_backward_and_naive_sends_after_it():
    launches = {"naive": 0, "overlap": 4, "a bucket for each": 4, "one bucket": 1, "ddp": 4}

    def work(cluster: Cluster) -> None:
        for name, count in launches.items():
            events = trace_of_a_step(name)
            (backward,) = (event for event in events if event.kind == "backward")
            sent = [event.start_ns for event in events if event.kind == "communication"]
            if name == "naive":
                assert len(sent) == 4 and min(sent) >= backward.end_ns
                assert overlap_of(events).hidden_share == 0
            launched = [event.start_ns for event in events if event.kind == "launch"]
            assert len(launched) == count, name
            assert all(backward.start_ns < moment < backward.end_ns for moment in launched), name

    run_ranks(work, 2)


def test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited():
    def work(cluster: Cluster, folder: Path) -> None:
        expected = one_process(layers(), lambda model: mean_square(model, X))
        for name in OVERLAPPING:
            model, has_ended = OURS[name](layers()), folder / name
            with slow_link.slowed(Link(0.05, 0.0)):  # an all-reduce between two ranks takes 0.1 seconds
                loss = mean_square(model, *mine(cluster, (X,)))
                # Rank 1 sends nothing before rank 0's backward has ended, unless that waits for rank 1.
                give_up = time.monotonic() + 5
                while cluster.rank == 1 and not has_ended.exists() and time.monotonic() < give_up:
                    time.sleep(0.001)
                waits = cluster.rank == 1 and not has_ended.exists()
                loss.backward()
                has_ended.touch()
                model.finish_gradient_sync()
                assert not waits, f"the backward of {name} on rank 0 waits for the messages of rank 1"
                assert_same(mean_gradients(model.module), expected, what=f"gradient of {name}")

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, 2, Path(folder))


@pytest.mark.parametrize("name", ["overlap", "one bucket", "ddp"])
def test_a_rank_that_dies_in_the_backward_is_named_by_the_ranks_that_wait_for_it(name: str):
    def work(cluster: Cluster) -> None:
        model = WRAPPERS[name](nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4))))
        if cluster.rank == 2:
            model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        model(torch.ones(1, 3)).sum().backward()
        model.finish_gradient_sync()

    # The group's timeout comes later: the error must not depend on it.
    results = run_ranks(work, 3, timeout=20, group_timeout=40, collect_failures=True)
    texts = [str(result).rsplit("comm.errors.CommError: ", 1)[-1] for result in results]
    assert texts[2] == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1):
        assert re.match(rf"all_reduce \((pipelined_ring|ring|torch)\): rank {rank} ", texts[rank])
        assert "has died or left, so look for the first error in its log" in texts[rank]
    assert name in ("one bucket", "ddp") or any("rank 2 has died" in texts[rank] for rank in (0, 1))
