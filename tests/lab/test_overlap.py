import pytest

from lab.trace.gantt import Event
from lab.trace.overlap import Overlap, overlap_of, per_step

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
