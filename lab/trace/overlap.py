"""Compute from a rank's spans how much of its communication was hidden behind its computing.

    main             |  forward  |      backward      |  wait  |
    communication                        | bucket 1 | bucket 0 |
                                         └── hidden ──┴─ not ──┘

An all-reduce that a hook calls, and that holds the main thread until it is done, lies within the backward's
*span*, but nothing is computed meanwhile. It is not hidden, but blocking:

    main             |  forward  |     backward                  |
                                            | all_reduce |             hidden: nothing; blocking: all of it

So spans of kind "wait" and "communication" on the main lane do not count as computing, and code that blocks
on another thread's work must record a wait.
Intervals are (start_ns, end_ns) on the events' clock. In a list they are sorted, not empty, and do not touch.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.trace.gantt import MAIN_LANE, Event

Interval = tuple[int, int]

COMPUTE = ("compute", "forward", "backward", "weight", "optimizer")
BLOCKED = ("wait", "communication")  # on the main lane


@dataclass(frozen=True)
class Overlap:
    """Hold seconds in which a rank computed, communicated, did both, and communicated on its main lane."""

    compute_seconds: float
    communication_seconds: float
    hidden_seconds: float
    blocking_seconds: float = 0.0

    @property
    def hidden_share(self) -> float | None:
        """Return `hidden_seconds` as a share of `communication_seconds`; None without communication."""
        return self.hidden_seconds / self.communication_seconds if self.communication_seconds else None

    @property
    def blocking_share(self) -> float | None:
        """Return `blocking_seconds` as a share of `communication_seconds`; None without communication."""
        return self.blocking_seconds / self.communication_seconds if self.communication_seconds else None


def overlap_of(events: Sequence[Event]) -> Overlap:
    """Return the overlap in one rank's events. Raise ValueError for events of several ranks."""
    if len({event.rank for event in events}) > 1:
        raise ValueError("overlap_of takes one rank's events; pick one")
    main = [event for event in events if event.lane == MAIN_LANE]
    compute = difference(busy(main, COMPUTE), busy(main, BLOCKED))
    communication = busy(events, ["communication"])
    hidden = intersection(communication, compute)
    blocking = busy(main, ["communication"])
    return Overlap(total(compute), total(communication), total(hidden), total(blocking))


def busy(events: Iterable[Event], kinds: Sequence[str]) -> list[Interval]:
    """Return when at least one event of these kinds was under way, on any lane. Touching ones make one."""
    merged: list[Interval] = []
    chosen = (event for event in events if event.kind in kinds and event.duration_ns > 0)
    for start, end in sorted((event.start_ns, event.end_ns) for event in chosen):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in both of two lists, which are as `busy` returns them."""
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:  # the one that ends first can meet nothing more
            i += 1
        else:
            j += 1
    return both


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in `a` but not in `b`; both are as `busy` returns them."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), a[-1][1]]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return intersection(a, gaps)


def total(intervals: Iterable[Interval]) -> float:
    """Return the length of all intervals together, in seconds."""
    return sum(end - start for start, end in intervals) / 1e9


def per_step(events: Iterable[Event], steps: Sequence[Interval]) -> list[list[Event]]:
    """Return the events that start in each step (start_ns, end_ns). Events outside all steps are left out."""
    starts = [start_ns for start_ns, _ in steps]
    inside: list[list[Event]] = [[] for _ in steps]
    for event in events:
        i = bisect_right(starts, event.start_ns) - 1
        if i >= 0 and event.start_ns < steps[i][1]:
            inside[i].append(event)
    return inside
