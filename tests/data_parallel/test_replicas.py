"""Test replicas alone: what each gradient is, in numbers, and which messages leave when.

tests/test_wrappers.py compares them, as all wrappers, with one process.
"""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from comm.collectives import barrier
from comm.cost import Link
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.check import assert_same, gradients
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.gantt import Event
from lab.trace.ledger import LEDGER
from lab.trace.metronome import Metronome
from lab.trace.overlap import overlap_of
from tests.equivalence import mean_gradients, mine, no_sync, one_process
from tests.on_ranks import on_ranks
from tests.tasks import X, layers, mean_square
from tests.wrappers import TINY, named, select

KIB = 1 / 1024  # in MiB
PLAIN = select(lesson="data_parallel", by_torch=False)

Wrap = Callable[[nn.Module], nn.Module]


class Middle(nn.Module):
    """A product of three parameters and the input; the one in the middle may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Parameter(torch.ones(1).double()) for _ in range(3))

    def forward(self, x: torch.Tensor, uses_middle: bool) -> torch.Tensor:
        y = x * self.first
        return (y * self.middle if uses_middle else y) * self.last


@on_ranks(3)
def test_a_gradient_is_the_mean_over_ranks_and_not_their_sum(cluster: Cluster):
    for wrapper in select(is_replica=True):
        model = wrapper.make(nn.Linear(3, 2, bias=False))
        model(torch.ones(1, 3) * (cluster.rank + 1)).sum().backward()
        model.finish_gradient_sync()
        mean = torch.full((2, 3), 2.0)  # of 1, 2 and 3
        assert_same(mean_gradients(model.module), {"weight": mean}, what=f"gradient of {wrapper}")

        if wrapper.lesson == "low_communication":  # its sums are of float32
            continue
        half = wrapper.make(nn.Linear(1, 1, bias=False).half())
        half(torch.full((1, 1), 40000.0).half()).sum().backward()  # the sum would overflow
        half.finish_gradient_sync()
        mean = torch.full((1, 1), 40000.0).half()
        assert_same(mean_gradients(half.module), {"weight": mean}, 2**-9, f"gradient of {wrapper}")


@on_ranks(2, timeout=20)
def test_a_parameter_that_some_ranks_or_none_use_has_the_mean_with_zeros(cluster: Cluster):
    """Gradients wait for those before them in the order, so one that no hook announces holds others up."""
    users_and_mean = {"both": 15.0, "none": 0.0, "rank 0": 5.0, "rank 1": 10.0}  # of the middle's gradient
    for wrapper in PLAIN:
        model = wrapper.make(Middle())
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
                gradients(model.module), expected, what=f"{wrapper}: used by {users}, the gradient of"
            )


@on_ranks(2)
def test_a_gradient_that_only_an_earlier_microbatch_has_is_averaged_too(cluster: Cluster):
    for wrapper in PLAIN:
        model, x = wrapper.make(Middle()), torch.ones(1).double()
        with no_sync(model):
            model(x, cluster.rank == 1).backward()
        model(x, False).backward()
        model.finish_gradient_sync()
        found = {key: p.grad.item() for key, p in model.module.named_parameters()}
        assert found == {"first": 2.0, "middle": 0.5, "last": 2.0}, wrapper


@on_ranks(2)
def test_two_forwards_before_one_backward_and_several_backwards_in_one_no_sync_add_up(cluster: Cluster):
    (x,) = mine(cluster, (X,))
    expected = one_process(layers(), lambda model: (model(X) * model(2 * X)).mean())
    thrice = one_process(layers(), lambda model: 3 * mean_square(model, X))
    for wrapper in select(is_replica=True):
        model = wrapper.make(layers(cluster.rank))
        (model(x) * model(2 * x)).mean().backward()
        model.finish_gradient_sync()
        assert_same(mean_gradients(model.module), expected, what=f"gradient of two forwards, {wrapper},")
        model.zero_grad()
        with no_sync(model):
            for _ in range(2):
                mean_square(model, x).backward()
        mean_square(model, x).backward()
        model.finish_gradient_sync()
        assert_same(mean_gradients(model.module), thrice, what=f"gradient of three backwards, {wrapper},")


@on_ranks(2)
def test_a_module_may_have_no_trained_parameters(cluster: Cluster):
    for wrapper in PLAIN:
        frozen = wrapper.make(nn.Linear(2, 2).requires_grad_(False))
        frozen(torch.ones(1, 2))
        frozen.finish_gradient_sync()
        assert frozen.module.weight.grad is None, wrapper


def messages_of(wrap: Wrap) -> tuple[int, int]:
    """Return how many messages a rank sends in a step of 8 layers of 1 KiB, and in no_sync() before it."""
    model = wrap(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))))
    counts = [_sent()]
    with no_sync(model):
        model(torch.ones(1, 16)).sum().backward()
    counts.append(_sent())
    model(torch.ones(1, 16)).sum().backward()
    model.finish_gradient_sync()
    return _sent() - counts[1], counts[1] - counts[0]


def _sent() -> int:
    rows = LEDGER.rows().items()
    return sum(row.messages_sent for entry, row in rows if entry.pattern != "header")


@on_ranks(3)
def test_naive_reduces_each_parameter_once(cluster: Cluster):
    sent, n = messages_of(named("naive").make)[0], cluster.world_size
    assert sent == 8 * 2 * (n - 1), (
        f"a step sent {sent} messages for 8 parameters on {n} ranks, and not 2(n-1) = {2 * (n - 1)} each"
    )


@on_ranks(2)
def test_a_message_carries_a_bucket_and_no_sync_sends_nothing(cluster: Cluster):
    n = cluster.world_size
    sent, too_early = messages_of(lambda module: BucketDataParallel(module, bucket_mb=2 * KIB))
    assert too_early == 0, f"a backward in no_sync() sent {too_early} messages, and not 0"
    assert sent == 4 * 2 * (n - 1), (
        f"a step sent {sent} messages for 8 KiB in buckets of 2 KiB on {n} ranks, and not "
        f"4 times 2(n-1) = {4 * 2 * (n - 1)}"
    )


def trace_of_a_step(
    wrap: Wrap, steps: int = 2, forward: float = 0.01
) -> tuple[list[Event], Event, list[Event]]:
    """Return the events of the last step, its backward, and its messages.

    Each of 4 layers has twice the time of a forward for its backward, and 12 ms on the wire.
    """
    layers = nn.ParameterList(torch.zeros(8) for _ in range(4))
    with slow_link.slowed(Link(0.004, 0.0)):
        model = wrap(Metronome(layers, [[layer] for layer in layers], forward, vocab_size=2))
        for _ in range(steps):
            model.zero_grad()
            barrier()  # a late rank would post its messages after the other backward
            timeline.start_recording()
            with timeline.span("forward", "forward"):
                loss = model(torch.zeros(1, 1)).sum()
            with timeline.span("backward", "backward"):
                loss.backward()
            model.finish_gradient_sync()
            timeline.stop_recording()
    events = timeline.recorded()
    (backward,) = (event for event in events if event.kind == "backward")
    return events, backward, [event for event in events if event.kind == "communication"]


@on_ranks(2)
def test_buckets_are_sent_while_the_backward_computes(cluster: Cluster):
    each = lambda module: BucketDataParallel(module, bucket_mb=TINY)  # noqa: E731
    # Slowly, because on a busy machine the thread that sends may start late.
    _, backward, sent = trace_of_a_step(each, steps=1, forward=0.1)
    early = [event for event in sent if event.start_ns < backward.end_ns]
    assert early, "all messages left after the backward, and not while it computed"


@on_ranks(2)
def test_messages_are_launched_in_the_backward_and_naive_sends_after_it(cluster: Cluster):
    launches = {"naive": 0, "overlap": 4, "a bucket for each": 4, "one bucket": 1, "ddp": 4}
    for name, count in launches.items():
        events, backward, sent = trace_of_a_step(named(name).make)
        if name == "naive":
            assert len(sent) == 4 and min(event.start_ns for event in sent) >= backward.end_ns
            assert overlap_of(events).hidden_share == 0
        launched = [event.start_ns for event in events if event.kind == "launch"]
        assert len(launched) == count, name
        assert all(backward.start_ns < moment < backward.end_ns for moment in launched), name


def test_a_backward_does_not_wait_for_its_messages_and_their_results_are_awaited():
    def work(cluster: Cluster, folder: Path) -> None:
        expected = one_process(layers(), lambda model: mean_square(model, X))
        for wrapper in select(lesson="data_parallel", by_torch=False, overlaps=True):
            model, has_ended = wrapper.make(layers()), folder / wrapper.name
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
                assert not waits, f"the backward of {wrapper} on rank 0 waits for the messages of rank 1"
                assert_same(mean_gradients(model.module), expected, what=f"gradient of {wrapper}")

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, 2, Path(folder))


@pytest.mark.parametrize("name", ["overlap", "one bucket", "ddp", "compressed"])
def test_a_rank_that_dies_in_the_backward_is_named_by_the_ranks_that_wait_for_it(name: str):
    def work(cluster: Cluster) -> None:
        model = named(name).make(nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4))))
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
    if name == "overlap":
        assert any("rank 2 has died" in texts[rank] for rank in (0, 1))
