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


def on_machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(10**9))
    monkeypatch.setattr(timeline, "_machine", lambda: f"machine {next(names)}")


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


def test_a_new_start_forgets_what_was_recorded():
    start_recording()
    with span("old"):
        pass
    start_recording()
    assert recorded() == []


def test_a_span_that_raises_is_recorded_and_does_not_swallow_the_error():
    start_recording()
    with pytest.raises(ZeroDivisionError), span("fails"):
        _ = 1 / 0
    assert [event.name for event in recorded()] == ["fails"]


def test_a_span_costs_next_to_nothing_while_recording_is_off():
    assert span("one") is span("another"), "nothing is made for it"
    begin = time.perf_counter()
    for _ in range(10_000):
        with span("off", kind="compute", step=1):
            pass
    assert time.perf_counter() - begin < 0.5  # 50 us each; it is well below 1 us


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


def test_work_that_ends_on_another_thread_can_be_recorded_with_its_own_lane():
    start_recording()
    record("all_reduce", "communication", 5 * MS, 7 * MS, lane="communication", bytes=1024)
    assert recorded() == [
        Event("all_reduce", "communication", 5 * MS, 2 * MS, "communication", {"bytes": 1024})
    ]


@pytest.mark.parametrize("make_stores", [hash_stores, tcp_stores])
def test_clocks_shifted_by_seconds_are_found_to_within_milliseconds(make_stores):
    shifts = [3 * SECONDS, -7 * SECONDS, 0, 40_000 * SECONDS]

    def on_shifted_clock(cluster: Cluster) -> int:
        return align(cluster, clock=lambda: time.perf_counter_ns() + shifts[cluster.rank])

    offsets = on_ranks(on_shifted_clock, make_stores(4))
    for offset, shift in zip(offsets, shifts, strict=True):
        assert abs(offset - (shifts[0] - shift)) < 50 * MS
    assert offsets[0] == 0


def test_the_offset_comes_from_the_fastest_round_trip(monkeypatch):
    on_machines_of_their_own(monkeypatch)
    calls = iter(range(10**9))

    def slow_at_first() -> (
        int
    ):  # the answers to the first pings arrive half a second late, but only seemingly
        return time.perf_counter_ns() + (SECONDS // 2 if next(calls) in range(1, 16, 2) else 0)

    def measure(cluster: Cluster) -> int:
        return align(cluster, rounds=10, clock=time.perf_counter_ns if cluster.is_main else slow_at_first)

    assert abs(on_ranks(measure, hash_stores(2))[1]) < 50 * MS


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_ranks_of_one_machine_have_one_clock_exactly(kind, tmp_path):
    if kind == "file":
        stores = [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    else:
        stores = tcp_stores(3) if kind == "tcp" else hash_stores(3)
    assert on_ranks(lambda cluster: align(cluster, rounds=4), stores) == [0, 0, 0]


def test_machines_that_differ_keep_the_measured_offset(monkeypatch):
    on_machines_of_their_own(monkeypatch)
    offsets = [on_ranks(align, hash_stores(2))[1] for _ in range(3)]
    assert any(offsets) and max(map(abs, offsets)) < 50 * MS  # one in 14 000 is 0 to the nanosecond


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


def test_gather_and_align_can_be_called_again_and_see_nothing_old():
    def twice(cluster: Cluster) -> list[list[str]]:
        seen = []
        for name in ("first", "second"):
            assert align(cluster, rounds=2) == 0, "an old answer would look like a clock that is behind"
            events = gather_events(
                cluster, events=[Event(f"{name} of {cluster.rank}", "compute", cluster.rank, 1)]
            )
            seen.append([event.name for event in events or []])
        return seen

    assert on_ranks(twice, hash_stores(2))[0] == [
        ["first of 0", "first of 1"],
        ["second of 0", "second of 1"],
    ]


def test_more_events_than_a_tcp_store_takes_in_one_value_arrive(monkeypatch):
    monkeypatch.setattr(timeline.zlib, "compress", lambda data: data)  # as if nothing could be compressed
    monkeypatch.setattr(timeline.zlib, "decompress", lambda data: data)

    def hand_in(cluster: Cluster) -> list[Event] | None:
        return gather_events(cluster, events=[Event("x" * 1_000_000, "compute", i, 1) for i in range(10)])

    assert len(on_ranks(hand_in, tcp_stores(2))[0]) == 20


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
