from hypothesis import given, settings
from hypothesis import strategies as st

from lab.trace.gantt import Event
from lab.trace.overlap import (
    COMPUTE,
    Overlap,
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


def test_a_wait_inside_the_backward_is_no_computing_and_hides_nothing():
    events = [
        event("backward", 0, 6),
        event("communication", 1, 4, "communication"),
        event("wait", 2, 4),
    ]
    assert overlap_of(events) == Overlap(4.0, 3.0, 1.0)


def test_an_event_belongs_to_the_step_it_starts_in():
    early, first, late, second, after = (event("compute", at, at + 3) for at in (0, 1, 4, 5, 9))
    events = [second, early, first, late, after]
    steps = [(1 * SECOND, 5 * SECOND), (5 * SECOND, 9 * SECOND), (20 * SECOND, 30 * SECOND)]
    assert per_step(events, steps) == [[first, late], [second], []]


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
