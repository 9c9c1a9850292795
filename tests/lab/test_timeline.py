"""What is recorded becomes a trace, a picture and a share of hidden communication."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from lab.trace import timeline
from lab.trace.gantt import COLORS, Event, draw
from lab.trace.overlap import Overlap, overlap_of, per_step
from lab.trace.timeline import (
    record,
    recorded,
    span,
    start_recording,
    stop_recording,
    write_chrome_trace,
)

MS = 1_000_000


@pytest.fixture(autouse=True)
def recording_is_off_and_forgotten_afterwards():
    yield
    start_recording()
    stop_recording()


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


def test_the_trace_has_a_process_per_rank_and_a_thread_per_lane_or_more_where_spans_cross(tmp_path):
    events = [
        Event("all_reduce", "communication", 9_000_002_000, 500, "communication", {"bytes": 8}, rank=1),
        Event("crossing", "communication", 9_000_002_400, 500, "communication", rank=1),
        Event("forward", "forward", 9_000_000_000, 3_000, rank=1),
        Event("inner", "compute", 9_000_000_000, 1_000, rank=1),
    ]
    rows = json.loads(write_chrome_trace(tmp_path / "trace.json", events).read_text())["traceEvents"]
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


MS = 1_000_000


def where(picture: Path, colour: str) -> np.ndarray:
    """Return which pixels have exactly this colour, in shape (height, width)."""
    pixels = (imread(picture)[..., :3] * 255).round().astype(int)
    return (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=-1)


def test_the_picture_shows_each_rank_and_each_kind_in_its_colour(tmp_path):
    events = [Event("forward", "forward", 0, 6 * MS, rank=r) for r in range(2)]
    events += [Event("step", "optimizer", 6 * MS, 4 * MS, rank=r) for r in range(2)]
    picture = draw(events, tmp_path / "a.png", title="two ranks")
    forward, step = where(picture, COLORS["forward"]), where(picture, COLORS["optimizer"])
    rows_with_forward = forward.sum(axis=1) > forward.shape[1] // 4
    assert (rows_with_forward[1:] & ~rows_with_forward[:-1]).sum() == 2, "one row of bars per rank"
    assert 1.2 < forward.sum() / step.sum() < 1.8, "6 ms beside 4 ms"


def test_a_picture_of_nothing_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="start_recording"):
        draw([], tmp_path / "a.png")


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
