import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.trace.gantt import Event
from lab.trace.overlap import (
    BLOCKED,
    COMMUNICATION,
    COMPUTE,
    Overlap,
    busy,
    difference,
    intersection,
    overlap_of,
    per_step,
    total,
    union,
)

SECOND = 1_000_000_000
KINDS = (*COMPUTE, "communication", "wait", "data", "launch")


def event(kind: str, start: float, end: float, lane: str = "main") -> Event:
    """From `start` to `end`, in seconds."""
    return Event(kind, kind, int(start * SECOND), int((end - start) * SECOND), lane)


def test_nothing_is_hidden_when_all_communication_follows_the_backward():
    events = [
        event("forward", 0, 2),
        event("backward", 2, 6),
        event("wait", 6, 9),
        event("communication", 6, 9, "communication"),
        event("optimizer", 9, 10),
    ]
    assert overlap_of(events) == Overlap(7.0, 3.0, 0.0)
    assert overlap_of(events).hidden_share == 0.0


def test_all_is_hidden_when_it_ends_before_the_backward_does():
    events = [event("backward", 0, 6), event("communication", 1, 5, "communication")]
    assert overlap_of(events) == Overlap(6.0, 4.0, 4.0)
    assert overlap_of(events).hidden_share == 1.0


def test_half_is_hidden_when_half_of_it_falls_into_the_wait():
    events = [
        event("backward", 0, 6),
        event("communication", 4, 8, "communication"),
        event("wait", 6, 8),
    ]
    assert overlap_of(events) == Overlap(6.0, 4.0, 2.0)
    assert overlap_of(events).hidden_share == 0.5


def test_a_blocking_all_reduce_inside_the_backward_hides_nothing():
    events = [event("backward", 0, 6), event("communication", 2, 3), event("communication", 4, 5)]
    assert overlap_of(events) == Overlap(4.0, 2.0, 0.0, 2.0)
    assert (overlap_of(events).hidden_share, overlap_of(events).blocking_share) == (0.0, 1.0)


def test_of_a_layers_reductions_the_forwards_block_and_the_backwards_are_hidden():
    events = [
        event("forward", 0, 6),
        event("communication", 2, 3),
        event("communication", 5, 6),
        event("backward", 6, 16),
        event("communication", 8, 10, "communication"),
        event("communication", 14, 17, "communication"),
        event("wait", 16, 17),
    ]
    found = overlap_of(events)
    assert found == Overlap(14.0, 7.0, 4.0, 2.0)
    assert (found.hidden_share, found.blocking_share) == (4 / 7, 2 / 7)  # what is left was waited for


def test_a_wait_inside_the_backward_is_no_computing_and_hides_nothing():
    events = [
        event("backward", 0, 6),
        event("communication", 1, 4, "communication"),
        event("wait", 2, 4),
    ]
    assert overlap_of(events) == Overlap(4.0, 3.0, 1.0)


def test_another_lanes_blocking_takes_no_computing_from_the_main_one():
    events = [
        event("backward", 0, 6),
        event("communication", 1, 4, "communication"),
        event("wait", 2, 3, "loader"),
    ]
    assert overlap_of(events) == Overlap(6.0, 3.0, 3.0)


def test_computing_on_another_lane_hides_nothing():
    events = [event("compute", 0, 6, "loader"), event("communication", 1, 4, "communication")]
    assert overlap_of(events) == Overlap(0.0, 3.0, 0.0)


def test_two_communications_at_once_count_once():
    events = [
        event("backward", 0, 4),
        event("communication", 1, 5, "communication"),
        event("communication", 2, 6, "communication 2"),
        event("communication", 3, 4, "communication 2"),
    ]
    assert overlap_of(events) == Overlap(4.0, 5.0, 3.0)


def test_a_span_within_a_span_counts_once():
    events = [event("backward", 0, 6), event("compute", 1, 2), event("weight", 2, 7)]
    assert union(events) == [(0, 7 * SECOND)]
    assert overlap_of(events).compute_seconds == 7.0


def test_loading_and_launching_is_neither_computing_nor_communication():
    events = [event("data", 0, 3), event("launch", 3, 4), event("communication", 0, 4, "communication")]
    assert overlap_of(events) == Overlap(0.0, 4.0, 0.0)


def test_without_communication_there_is_no_share_to_speak_of():
    assert overlap_of([]) == Overlap(0.0, 0.0, 0.0)
    assert overlap_of([]).hidden_share is None is overlap_of([]).blocking_share
    assert overlap_of([event("forward", 0, 1), event("communication", 1, 1)]).hidden_share is None


def test_events_of_several_ranks_are_refused():
    events = [event("backward", 0, 1), event("communication", 0, 1)._replace(rank=2)]
    with pytest.raises(ValueError, match=r"ranks \[0, 2\]"):
        overlap_of(events)


def test_spans_that_touch_are_one_interval_and_those_of_no_length_none():
    assert union([event("wait", 3, 4), event("wait", 1, 2), event("wait", 2, 3)]) == [(SECOND, 4 * SECOND)]
    assert union([event("wait", 1, 1)]) == [] == union([])


def test_busy_looks_at_the_given_kinds_on_all_lanes():
    events = [event("forward", 0, 2), event("wait", 1, 3, "loader"), event("backward", 4, 5)]
    assert busy(events, ("forward", "wait")) == [(0, 3 * SECOND)]
    assert total(busy(events, COMPUTE)) == 3.0


def test_an_event_belongs_to_the_step_it_starts_in():
    early, first, late, second, after = (event("compute", at, at + 3) for at in (0, 1, 4, 5, 9))
    events = [second, early, first, late, after]
    steps = [(1 * SECOND, 5 * SECOND), (5 * SECOND, 9 * SECOND), (20 * SECOND, 30 * SECOND)]
    assert per_step(events, steps) == [[first, late], [second], []]


def test_thousands_of_steps_are_told_apart_at_once():
    events = [event("compute", at, at + 0.5) for at in range(40_000)]
    steps = [(at * SECOND, (at + 10) * SECOND) for at in range(0, 40_000, 10)]
    started = time.perf_counter()
    by_step = per_step(events, steps)
    assert time.perf_counter() - started < 1
    assert by_step == [events[at : at + 10] for at in range(0, 40_000, 10)]


EVENTS = st.lists(
    st.builds(
        Event,
        name=st.just("span"),
        kind=st.sampled_from(KINDS),
        start_ns=st.integers(-5, 25),
        duration_ns=st.integers(0, 12),
        lane=st.sampled_from(["main", "communication", "loader"]),
        args=st.just({}),
        rank=st.just(0),
    ),
    max_size=10,
)


def cells(events: list[Event]) -> set[int]:
    """The whole nanoseconds in which at least one event was under way."""
    return {at for e in events for at in range(e.start_ns, e.end_ns)}


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    """Their nanoseconds; fails unless they are sorted, apart and not empty."""
    ends = [edge for interval in intervals for edge in interval]
    assert ends == sorted(set(ends))
    return {at for start, end in intervals for at in range(start, end)}


@settings(max_examples=300)
@given(EVENTS, EVENTS)
def test_intervals_are_the_same_as_sets_of_nanoseconds(one: list[Event], other: list[Event]):
    a, b = union(one), union(other)
    assert covered(a) == cells(one)
    assert covered(intersection(a, b)) == cells(one) & cells(other)
    assert covered(difference(a, b)) == cells(one) - cells(other)
    assert total(a) == len(cells(one)) / 1e9


@settings(max_examples=300)
@given(EVENTS)
def test_the_overlap_is_what_counting_nanosecond_by_nanosecond_gives(events: list[Event]):
    main = [e for e in events if e.lane == "main"]
    blocked = cells([e for e in main if e.kind in BLOCKED])
    computing = cells([e for e in main if e.kind in COMPUTE]) - blocked
    communicating = cells([e for e in events if e.kind in COMMUNICATION])
    hidden = computing & communicating
    blocking = cells([e for e in main if e.kind in COMMUNICATION])
    parts = (computing, communicating, hidden, blocking)
    assert overlap_of(events) == Overlap(*(len(part) / 1e9 for part in parts))
