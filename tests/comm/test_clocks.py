import time

from comm.clocks import clock_offset, gather_events
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.gantt import Event

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
