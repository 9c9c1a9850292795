"""Write recorded events for Perfetto: https://ui.perfetto.dev.

Trace Event Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.trace.gantt import Event, lanes, tracks


def write_chrome_trace(path: str | Path, events: Iterable[Event]) -> Path:
    """Write events as a trace for https://ui.perfetto.dev: a process for each rank, a thread for each lane.

    Times become microseconds since the first event. In the format two spans of a thread must be disjoint or
    nested. So a lane whose spans overlap becomes several threads of the same name.
    """
    table = lanes(events)
    zero = min(
        (event.start_ns for by_lane in table.values() for lane in by_lane.values() for event in lane),
        default=0,
    )
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
                rows[-1] |= {"args": {key: _plain(value) for key, value in event.args.items()}}
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}))
    return Path(path)


def _label(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _plain(value: Any) -> Any:
    """Return a number or a text unchanged, and all else as text: strict JSON has no NaN or infinity."""
    finite = isinstance(value, float) and math.isfinite(value)
    return value if finite or isinstance(value, int | str) else str(value)
