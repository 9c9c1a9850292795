"""Every rank learns what the others have, and an error of one rank is an error of all."""

import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm.clocks import clock_offset, gather_events
from comm.cost import Link
from comm.exchange import exchange, on_all, on_main
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.gantt import Event
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_values_of_any_size_and_kind_arrive_in_rank_order_and_no_slow_link_slows_them_down(cluster: Cluster):
    rank, n = cluster.rank, cluster.world_size
    some, start = dist.new_group([0, 2]), time.monotonic()
    with slow_link.slowed(Link(2.0, 0.0)):
        assert exchange(rank / 3) == [r / 3 for r in range(n)]
        assert exchange("word" * 1000 * rank) == ["word" * 1000 * r for r in range(n)]
        value = {"of": (rank, None, [b"bytes"])}
        assert exchange(value) == [{"of": (r, None, [b"bytes"])} for r in range(n)]
        assert [t.tolist() for t in exchange(torch.arange(rank))] == [list(range(r)) for r in range(n)]
        assert rank == 1 or exchange(10 * rank, some) == [0, 20]
        assert on_all("count", lambda: rank) == [0, 1, 2] and on_main(cluster, "count", lambda: 7) == 7
    assert time.monotonic() - start < 2


def test_an_error_of_one_rank_is_every_ranks_error_in_a_sentence_and_a_bug_keeps_its_class_there(tmp_path):
    def work(cluster: Cluster) -> str:
        def fail() -> None:
            if cluster.rank == 1:
                (tmp_path / "missing").read_bytes()

        with pytest.raises(WorkbookError) as caught:
            on_all("read it", fail)
        assert str(caught.value) == f"cannot read it: No such file or directory ({tmp_path / 'missing'})"
        with pytest.raises((KeyError, WorkbookError)) as caught:
            on_main(cluster, "look it up", lambda: {}["name"])
        return type(caught.value).__name__

    assert run_ranks(work, 3) == ["KeyError", "WorkbookError", "WorkbookError"]


class Opener:
    """Writes itself as a call of `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def test_a_value_that_would_run_code_when_it_is_read_is_refused_and_does_not(tmp_path):
    def work(cluster: Cluster) -> None:
        with pytest.raises(pickle.UnpicklingError):
            exchange(Opener(tmp_path / "opened"))

    run_ranks(work, 2)
    assert not (tmp_path / "opened").exists()


MS, SECONDS = 1_000_000, 1_000_000_000


def test_clocks_shifted_by_seconds_are_found_to_within_milliseconds():
    shifts = [3 * SECONDS, -7 * SECONDS, 0, 40_000 * SECONDS]

    def on_shifted_clock(cluster: Cluster) -> int:
        with replaced("comm.clocks.machine_id", lambda: str(cluster.rank)):
            return clock_offset(lambda: time.perf_counter_ns() + shifts[cluster.rank])

    offsets = run_ranks(on_shifted_clock, 4)
    for offset, shift in zip(offsets, shifts, strict=True):
        assert abs(offset - (shifts[0] - shift)) < 50 * MS
    assert offsets[0] == 0


def test_every_rank_gets_all_ranks_events_on_one_clock():
    def hand_in(cluster: Cluster) -> list[Event]:
        own = Event(f"step of {cluster.rank}", "compute", 100 - 30 * cluster.rank, 10, args={"loss": 0.5})
        with replaced("comm.clocks.clock_offset", lambda: cluster.rank):
            return gather_events([own])

    starts = {2: 42, 1: 71, 0: 100}
    expected = [
        Event(f"step of {rank}", "compute", start, 10, "main", {"loss": 0.5}, rank)
        for rank, start in starts.items()
    ]
    assert run_ranks(hand_in, 3) == [expected] * 3
