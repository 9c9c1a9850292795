import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.launch.interface import open_store
from lab.trace import timeline
from lab.trace.gantt import Event
from lab.trace.timeline import (
    align,
    gather_events,
    record,
    recorded,
    span,
    start_recording,
    stop_recording,
    write_chrome_trace,
)

MS = 1_000_000
SECONDS = 1_000_000_000


@pytest.fixture(autouse=True)
def recording_is_off_and_forgotten_afterwards():
    yield
    start_recording()
    stop_recording()


def on_ranks(fn: Callable[..., Any], world_size: int) -> list[Any]:
    """Call fn(cluster) on a thread for each rank. If one fails, the store's timeout ends the others."""
    limit = timedelta(seconds=10)
    host = open_store("127.0.0.1", 0, limit)
    stores = [host, *(dist.TCPStore("127.0.0.1", host.port, timeout=limit) for _ in range(world_size - 1))]
    clusters = [Cluster(r, world_size, r, torch.device("cpu"), store) for r, store in enumerate(stores)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(fn, clusters))


def test_a_span_is_recorded_with_its_name_kind_time_and_arguments_between_start_and_stop():
    with span("too early"):
        pass
    start_recording()
    before = timeline.now()
    with span("forward", kind="forward", microbatch=3):
        time.sleep(0.01)
    after = timeline.now()
    stop_recording()
    record("too late", "compute", 0, 1)
    (event,) = recorded()
    assert event[:2] == ("forward", "forward") and event.args == {"microbatch": 3} and event.lane == "main"
    assert before <= event.start_ns < event.start_ns + 10 * MS <= event.end_ns <= after


def test_clocks_shifted_by_seconds_are_found_to_within_milliseconds():
    shifts = [3 * SECONDS, -7 * SECONDS, 0, 40_000 * SECONDS]

    def on_shifted_clock(cluster: Cluster) -> int:
        return align(cluster, clock=lambda: time.perf_counter_ns() + shifts[cluster.rank])

    offsets = on_ranks(on_shifted_clock, 4)
    for offset, shift in zip(offsets, shifts, strict=True):
        assert abs(offset - (shifts[0] - shift)) < 50 * MS
    assert offsets[0] == 0


@pytest.mark.parametrize("call, present, missing", [(align, 0, 1), (align, 1, 0), (gather_events, 0, 1)])
def test_a_rank_that_does_not_take_part_is_named_within_the_stores_timeout(call, present, missing):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(TimeoutError, match=rf"{call.__name__}: rank {missing} did not take part.*0\.3 s"):
        call(Cluster(present, 2, present, torch.device("cpu"), store))


def test_gather_brings_all_ranks_events_to_rank_0_on_one_clock():
    def hand_in(cluster: Cluster) -> list[Event] | None:
        own = Event(f"step of {cluster.rank}", "compute", 100 - 30 * cluster.rank, 10, args={"loss": 0.5})
        return gather_events(cluster, offset_ns=cluster.rank, events=[own])

    first, *others = on_ranks(hand_in, 3)
    starts = {2: 42, 1: 71, 0: 100}
    assert first == [
        Event(f"step of {rank}", "compute", start, 10, "main", {"loss": 0.5}, rank)
        for rank, start in starts.items()
    ]
    assert others == [None, None]


def test_the_trace_has_a_process_per_rank_and_a_thread_per_lane_or_more_where_spans_cross(tmp_path):
    events = [
        Event("all_reduce", "communication", 9_000_002_000, 500, "communication", {"bytes": 8}, rank=1),
        Event("crossing", "communication", 9_000_002_400, 500, "communication", {"x": float("nan")}, rank=1),
        Event("forward", "forward", 9_000_000_000, 3_000, rank=1),
        Event("inner", "compute", 9_000_000_000, 1_000, rank=1),
    ]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = write_chrome_trace(tmp_path / "trace.json", events).read_text()
    rows = json.loads(text, parse_constant=refuse)["traceEvents"]
    assert all(row["pid"] > 0 and row["tid"] > 0 for row in rows), "Perfetto treats zero as the idle task"
    names = {(row["tid"], row["name"]): row["args"] for row in rows if row["ph"] == "M"}
    spans = {row["name"]: row for row in rows if row["ph"] == "X"}
    sent = spans["all_reduce"]
    assert (sent["ts"], sent["dur"], sent["cat"], sent["args"]) == (2.0, 0.5, "communication", {"bytes": 8})
    assert spans["forward"]["tid"] == spans["inner"]["tid"] == sent["pid"]
    assert len({spans[name]["tid"] for name in ("forward", "all_reduce", "crossing")}) == 3
    assert names[sent["pid"], "process_name"] == {"name": "rank 1"}
    assert names[spans["forward"]["tid"], "thread_name"] == {"name": "main"}
    for name in ("all_reduce", "crossing"):
        assert names[spans[name]["tid"], "thread_name"] == {"name": "communication"}
