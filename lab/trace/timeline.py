"""Record spans of time, and write them as a trace for Perfetto.

    start_recording()
    with span("forward", kind="forward", microbatch=3):
        ...
    record("bucket 0", "communication", started_ns, ended_ns, lane="communication")
    events = gather_events()           # comm/clocks.py: those of all ranks, on one clock
    write_chrome_trace("trace.json", events)

    rank 0         |  forward  |      backward      | step |
    communication              | bucket 0 | bucket 1 |

On a GPU a span starts and ends at marks in the stream (lab.trace.stream_clock).
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lab.autograd import is_in_backward
from lab.trace.gantt import MAIN_LANE, Event, lanes, tracks
from lab.trace.stream_clock import StreamClock

Moment = int | torch.cuda.Event  # nanoseconds of `now`, or a mark in a GPU's stream

# A monotonic clock: NTP never sets it back. All processes and containers of a machine share it. Other
# machines have other clocks, and comm/clocks.py measures the offset.
now = time.perf_counter_ns

_recording = False
# Name, kind, start, end, lane and arguments. Threads append without a lock: append is atomic.
_unread: deque[tuple[str, str, Moment, Moment, str, dict[str, Any]]] = deque()
_events: list[Event] = []  # the spans whose marks have been read
_clock: StreamClock | None = None
_NOTHING = nullcontext()


def start_recording(device: torch.device | None = None) -> None:
    """Remove all spans, and start to record; with a GPU as `device` call `settle()` after each step."""
    global _recording, _clock
    _events.clear()
    _unread.clear()
    _clock = StreamClock(device) if device is not None and device.type == "cuda" else None
    _recording = True


def stop_recording() -> None:
    """Stop recording. Recorded spans stay until the next start, and open spans are dropped."""
    global _recording
    _recording = False


def is_recording() -> bool:
    """Return whether spans are being recorded."""
    return _recording


def recorded() -> list[Event]:
    """Return this process's events so far, on its own clock. Wait for the GPU, if one is recorded."""
    settle()
    return list(_events)


def settle() -> None:
    """Read the marks of all spans so far. Wait for the GPU, if one is recorded."""
    is_needed = _clock is not None and (_recording or _unread)
    while _unread:
        name, kind, start, end, lane, args = _unread.popleft()
        start_ns = _read(start)
        _events.append(Event(name, kind, start_ns, max(0, _read(end) - start_ns), lane, args))
    if _clock is not None and is_needed:
        _clock.set_anchor()


def _read(moment: Moment) -> int:
    if isinstance(moment, int):
        return moment
    assert _clock is not None
    return _clock.read(moment)


def mark() -> Moment:
    """Return this moment, for `record`: `now()`, or with a GPU a mark in the stream of this thread.

    A thread without a stream of its own launches nothing, and takes the host's clock.
    """
    if _recording and _clock is not None and (_own_lane() == MAIN_LANE or _clock.has_own_stream()):
        return _clock.mark()
    return now()


def span(name: str, kind: str = "compute", **args: Any) -> AbstractContextManager[None]:
    """Record the time of a `with` block, also if it raises. `kind` sets the colour; Perfetto shows `args`."""
    return _Timed(name, kind, args) if _recording else _NOTHING


class _Timed:
    """Record a span around a block. This is a class, because a generator takes three times as long."""

    def __init__(self, name: str, kind: str, args: dict[str, Any]) -> None:
        self._name, self._kind, self._args = name, kind, args

    def __enter__(self) -> None:
        self._start = mark()

    def __exit__(self, *error: object) -> None:
        record(self._name, self._kind, self._start, mark(), **self._args)


def record(name: str, kind: str, start: Moment, end: Moment, *, lane: str | None = None, **args: Any) -> None:
    """Add a span from its start and end, each `now()` or `mark()`; `lane` is by default the thread's."""
    if _recording:
        _unread.append((name, kind, start, end, lane or _own_lane(), args))


def _own_lane() -> str:
    """Return the thread's lane; autograd's own thread, for which the main thread waits, has the main lane."""
    thread = threading.current_thread()
    is_autograds = isinstance(thread, threading._DummyThread) and is_in_backward()
    return MAIN_LANE if is_autograds or thread is threading.main_thread() else thread.name


def write_chrome_trace(path: str | Path, events: Iterable[Event]) -> Path:
    """Write events in Perfetto's Trace Event Format: a process for each rank, a thread for each track."""
    events = list(events)
    table, zero = lanes(events), min((event.start_ns for event in events), default=0)
    rows: list[dict[str, Any]] = []
    for rank, by_lane in table.items():
        # Perfetto takes pid 0 and tid 0 for the idle task, and merges tid 0 with tid 1.
        pid = rank + 1
        rows += [_label("process_name", pid, pid, name=f"rank {rank}")]
        rows += [_label("process_sort_index", pid, pid, sort_index=rank)]
        threads = [(lane, track) for lane, spans in by_lane.items() for track in tracks(spans, nest=True)]
        for i, (lane, track) in enumerate(threads):
            tid = pid + i * (max(table) + 1)  # unique in the file; the main lane's tid is pid, as on Linux
            rows += [_label("thread_name", pid, tid, name=lane)]
            rows += [_label("thread_sort_index", pid, tid, sort_index=i)]
            for event in track:
                rows.append({"ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid})
                rows[-1] |= {"ts": (event.start_ns - zero) / 1000, "dur": event.duration_ns / 1000}
                rows[-1] |= {"args": event.args}
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}), "utf-8")
    return Path(path)


def read_chrome_trace(path: str | Path) -> list[Event]:
    """Return the events of a file that `write_chrome_trace` has written; their times start at the first."""
    rows = json.loads(Path(path).read_text("utf-8"))["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    return [
        Event(
            row["name"], row["cat"], round(row["ts"] * 1000), round(row["dur"] * 1000), names[row["tid"]],
            row["args"], row["pid"] - 1,
        )
        for row in rows
        if row["ph"] == "X"
    ]  # fmt: skip


def _label(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
