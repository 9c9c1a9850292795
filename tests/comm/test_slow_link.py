"""A simulated slow link takes the time of its formula, carries one thing at a time, and uses no processor."""

import time

import pytest
import torch

from comm import collectives, cost
from comm.collectives import all_reduce, barrier, pattern_for, reduce_scatter
from comm.cost import Link
from comm.wire import slow_link
from comm.wire.groups import own_group
from comm.wire.transport import use_transport
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Traffic
from lab.trace.timeline import recorded, start_recording
from tests.on_ranks import on_ranks

MIB = 1 << 20


def test_a_link_has_a_rate_and_perhaps_a_latency():
    assert slow_link.parse("200mbit") == Link(0.0, 1 / 25e6)
    assert slow_link.parse("1gbit,0.2ms") == Link(2e-4, 1 / 125e6)


@pytest.mark.parametrize("text", ["fast", "1gbit,", "1gbit,fast", "0mbit", "0.2ms,1gbit", ""])
def test_what_is_not_a_link_is_refused_in_a_sentence(text: str):
    with pytest.raises(WorkbookError, match=r"^--link .* \(a link is a rate, or rate,latency\)\.$"):
        slow_link.parse(text)


@pytest.mark.parametrize(
    ("pattern", "transport"),
    [("pipelined_ring", "auto"), ("tree", "sockets"), ("ring", "gloo"), ("torch", "auto")],
)
@on_ranks(3)
def test_a_collective_takes_at_least_the_time_of_its_formula_in_every_pattern(
    cluster, pattern: str, transport: str
):
    use_transport(transport)
    link, x = Link(0.01, 1 / 50e6), torch.ones(MIB // 4)
    all_reduce(x, pattern=pattern)
    expected = cost.seconds("all_reduce", cost.formula_of("all_reduce", pattern), MIB, 3, link)
    with slow_link.slowed(link):
        for async_op in (False, True):
            barrier(pattern="torch")
            start = time.perf_counter()
            all_reduce(x, async_op=async_op, pattern=pattern).wait()
            assert time.perf_counter() - start >= expected
    assert (x == 27).all()


@on_ranks(2, timeout=60)
def test_groups_share_a_link_and_a_group_of_one_machine_needs_none(cluster):
    shared, exempted = own_group([[0, 1]]), own_group([[0, 1]])
    slow_link.share(shared, 2)
    slow_link.exempt(exempted)
    x, link = torch.ones(MIB // 4), Link(0.0, 1 / 50e6)
    alone = cost.seconds("all_reduce", "ring", MIB, 2, link)
    with slow_link.slowed(link):
        start = time.perf_counter()
        all_reduce(x, group=shared, pattern="ring")
        assert time.perf_counter() - start >= 2 * alone
    with slow_link.slowed(Link(3600.0, 0.0)):
        all_reduce(x, group=exempted, pattern="ring")


@on_ranks(2)
def test_the_calling_thread_is_free_while_the_link_is_busy(cluster):
    with slow_link.slowed(Link(0.1, 0.0)):
        handle = reduce_scatter(torch.empty(2), torch.ones(4), async_op=True)
        assert not handle.is_completed()
        handle.wait()


@pytest.mark.parametrize("pattern", ["pipelined_ring", "torch"])
@on_ranks(2)
def test_the_time_on_the_link_is_seen_as_communication_on_its_own_lane(cluster, pattern: str):
    start_recording()
    posted = time.perf_counter_ns()
    with slow_link.slowed(Link(0.02, 0.0)):
        all_reduce(torch.ones(3), async_op=True, pattern=pattern).wait()
    events = {event.kind: event for event in recorded()}
    assert {kind: event.lane for kind, event in events.items()} == {
        "launch": "launches",
        "wait": "main",
        "communication": "communication",
    }
    event = events["communication"]
    assert event.name == "all_reduce"
    assert event.start_ns + event.duration_ns - posted >= 40_000_000
    assert event.args["bytes"] == 12


@on_ranks(3)
def test_few_messages_win_for_small_tensors_and_few_bytes_for_large_ones(cluster):
    with replaced("comm.cost.link_of", lambda group, ring=None: Link(1e-4, 1e-9)):
        sizes = (1, 1000, 10_000, MIB, 64 * MIB)
        chosen = [pattern_for("all_reduce", "auto", size) for size in sizes]
    assert chosen == ["flat"] * 3 + ["pipelined_ring"] * 2


def test_a_link_is_measured_once_on_all_ranks_alike_and_not_counted():
    def count(cluster) -> tuple[Link, Link]:
        LEDGER.clear()
        chosen = pattern_for("all_reduce", "auto", 4000)
        assert LEDGER.total() == Traffic()
        collectives.all_reduce(torch.ones(1000), pattern="auto")
        assert {entry.pattern for entry in LEDGER.rows()} == {chosen, "header"}
        expected = cost.expected_traffic("all_reduce", "auto", 1000, 4)
        assert LEDGER.total() == expected
        fast = cost.link_of(None)
        with slow_link.slowed(Link(0.01, 1e-9)):  # another link is measured again
            slow = cost.link_of(None)
        assert cost.link_of(None) is fast and slow.alpha > 0.009 > fast.alpha > 0
        return fast, slow

    assert len(set(run_ranks(count, 2))) == 1
