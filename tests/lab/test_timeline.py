import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.cluster import Cluster
from lab.launch.store import open_store
from lab.trace import timeline
from lab.trace.gantt import Event, lanes, tracks
from lab.trace.timeline import align, gather_events, record, recorded, span, start_recording, stop_recording

MS = 1_000_000
SECONDS = 1_000_000_000


@pytest.fixture(autouse=True)
def recording_is_off_and_forgotten_afterwards():
    yield
    start_recording()
    stop_recording()


def on_ranks(fn: Callable[..., Any], stores: list[dist.Store]) -> list[Any]:
    """Call fn(cluster) on a thread for each rank. If one fails, the store's timeout ends the others."""
    clusters = [Cluster(r, len(stores), r, torch.device("cpu"), store) for r, store in enumerate(stores)]
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(fn, clusters))


def hash_stores(world_size: int) -> list[dist.Store]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    return [store] * world_size


def tcp_stores(world_size: int) -> list[dist.Store]:
    limit = timedelta(seconds=10)
    host = open_store("127.0.0.1", 0, limit)
    return [host] + [dist.TCPStore("127.0.0.1", host.port, timeout=limit) for _ in range(world_size - 1)]


def test_a_span_is_recorded_with_its_name_kind_time_and_arguments():
    start_recording()
    before = timeline.now()
    with span("forward", kind="forward", microbatch=3):
        time.sleep(0.01)
    (event,) = recorded()
    assert event[:2] == ("forward", "forward") and event.args == {"microbatch": 3} and event.lane == "main"
    assert before <= event.start_ns < event.start_ns + 10 * MS <= event.end_ns <= timeline.now()


def test_nothing_is_recorded_before_the_start_or_after_the_stop():
    with span("too early"):
        pass
    start_recording()
    with span("recorded"):
        pass
    stop_recording()
    with span("too late"):
        pass
    record("too late", "compute", 0, 1)
    assert [event.name for event in recorded()] == ["recorded"]


def test_a_thread_has_a_lane_of_its_own_name_and_loses_no_span():
    def work() -> None:
        for i in range(500):
            with span(f"bucket {i}", kind="communication"):
                pass

    start_recording()
    threads = [threading.Thread(target=work, name=f"sender {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    by_lane = lanes(recorded())[0]
    assert list(by_lane) == ["main", "sender 0", "sender 1", "sender 2", "sender 3"]
    assert {len(events) for events in by_lane.values()} == {500}


@pytest.mark.parametrize("make_stores", [hash_stores, tcp_stores])
def test_clocks_shifted_by_seconds_are_found_to_within_milliseconds(make_stores):
    shifts = [3 * SECONDS, -7 * SECONDS, 0, 40_000 * SECONDS]

    def on_shifted_clock(cluster: Cluster) -> int:
        return align(cluster, clock=lambda: time.perf_counter_ns() + shifts[cluster.rank])

    offsets = on_ranks(on_shifted_clock, make_stores(4))
    for offset, shift in zip(offsets, shifts, strict=True):
        assert abs(offset - (shifts[0] - shift)) < 50 * MS
    assert offsets[0] == 0


@pytest.mark.parametrize("call, present, missing", [(align, 0, 1), (align, 1, 0), (gather_events, 0, 1)])
def test_a_rank_that_does_not_take_part_is_named_within_the_stores_timeout(call, present, missing):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{call.__name__}: rank {missing} did not take part.*0\.3 s"):
        call(Cluster(present, 2, present, torch.device("cpu"), store))
    assert time.monotonic() - begin < 5


def test_gather_brings_all_ranks_events_to_rank_0_on_one_clock():
    def hand_in(cluster: Cluster) -> list[Event] | None:
        own = [
            Event(f"step of {cluster.rank}", "compute", 100 - 30 * cluster.rank, 10, "main", {"loss": 0.5})
        ]
        return gather_events(cluster, offset_ns=cluster.rank, events=own)

    first, *others = on_ranks(hand_in, tcp_stores(3))
    assert first == [
        Event("step of 2", "compute", 42, 10, "main", {"loss": 0.5}, 2),
        Event("step of 1", "compute", 71, 10, "main", {"loss": 0.5}, 1),
        Event("step of 0", "compute", 100, 10, "main", {"loss": 0.5}, 0),
    ]
    assert others == [None, None]


def test_a_track_holds_no_two_events_at_once_unless_nested_ones_are_allowed():
    outer, inner, late, crossing = (
        Event("outer", "compute", 0, 10),
        Event("inner", "compute", 2, 3),
        Event("late", "compute", 10, 5),
        Event("crossing", "compute", 8, 4),
    )
    events = [late, crossing, inner, outer]
    assert tracks(events, nest=False) == [[outer, late], [inner, crossing]]
    assert tracks(events, nest=True) == [[outer, inner, late], [crossing]]
    first_call = Event("first call", "compute", 0, 2)
    assert tracks([first_call, outer], nest=True) == [[outer, first_call]], (
        "the one that holds the other first"
    )


def test_save_writes_trace_and_picture_on_rank_0_only(tmp_path):
    start_recording()
    with span("forward"):
        time.sleep(0.001)
    folder = tmp_path / "new" / "folder"
    paths, nothing = on_ranks(lambda cluster: timeline.save(cluster, folder, "two"), hash_stores(2))
    assert paths == [folder / "trace.json", folder / "timeline.png"] and nothing == []
    assert [Path(path).stat().st_size > 0 for path in paths] == [True, True]
