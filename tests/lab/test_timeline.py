import json
import time

import pytest

from lab.trace import timeline
from lab.trace.gantt import Event
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
