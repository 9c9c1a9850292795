import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.trace.gantt import Event
from lab.trace.overlap import COMPUTE, Overlap, difference, intersection, overlap_of, per_step, total, union

SECOND = 1_000_000_000


def event(kind: str, start: float, end: float, lane: str = "main") -> Event:
    return Event(kind, kind, int(start * SECOND), int((end - start) * SECOND), lane)


@pytest.mark.parametrize(
    "events, expected",
    [
        (  # all communication follows the backward
            [event("backward", 0, 6), event("wait", 6, 9), event("communication", 6, 9, "communication")],
            Overlap(6.0, 3.0, 0.0),
        ),
        (  # it ends before the backward does
            [event("backward", 0, 6), event("communication", 1, 5, "communication")],
            Overlap(6.0, 4.0, 4.0),
        ),
        (  # half of it falls into the wait
            [event("backward", 0, 6), event("communication", 4, 8, "communication"), event("wait", 6, 8)],
            Overlap(6.0, 4.0, 2.0),
        ),
        (  # a wait inside the backward is no computing, and hides nothing
            [event("backward", 0, 6), event("communication", 1, 4, "communication"), event("wait", 2, 4)],
            Overlap(4.0, 3.0, 1.0),
        ),
        (  # neither does communication on the main lane, which blocks
            [event("backward", 0, 6), event("communication", 2, 4)],
            Overlap(4.0, 2.0, 0.0, 2.0),
        ),
    ],
)
def test_communication_is_hidden_where_the_main_lane_computes(events, expected):
    assert overlap_of(events) == expected
    assert overlap_of(events).hidden_share == expected.hidden_seconds / expected.communication_seconds


def test_an_event_belongs_to_the_step_it_starts_in():
    early, first, late, second, after = (event("compute", at, at + 3) for at in (0, 1, 4, 5, 9))
    events = [second, early, first, late, after]
    steps = [(1 * SECOND, 5 * SECOND), (5 * SECOND, 9 * SECOND), (20 * SECOND, 30 * SECOND)]
    assert per_step(events, steps) == [[first, late], [second], []]


EVENTS = st.lists(
    st.builds(
        Event,
        name=st.just("span"),
        kind=st.sampled_from(COMPUTE),
        start_ns=st.integers(-5, 25),
        duration_ns=st.integers(0, 12),
        lane=st.just("main"),
        args=st.just({}),
        rank=st.just(0),
    ),
    max_size=10,
)


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    """Return the nanoseconds of intervals; fail unless these are sorted, apart and not empty."""
    ends = [edge for interval in intervals for edge in interval]
    assert ends == sorted(set(ends))
    return {at for start, end in intervals for at in range(start, end)}


@settings(max_examples=100)
@given(EVENTS, EVENTS)
def test_intervals_are_the_same_as_sets_of_nanoseconds(one: list[Event], other: list[Event]):
    a, b = union(one), union(other)
    of_one, of_other = ({at for e in events for at in range(e.start_ns, e.end_ns)} for events in (one, other))
    assert covered(a) == of_one
    assert covered(intersection(a, b)) == of_one & of_other
    assert covered(difference(a, b)) == of_one - of_other
    assert total(a) == len(of_one) / 1e9
