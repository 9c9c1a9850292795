"""How much of a rank's communication hid behind its computing: read off its spans, not off the code.

    main             |  forward  |      backward      |  wait  |
    communication                        | bucket 1 | bucket 0 |
                                         └── hidden ──┴─ not ──┘

    overlap_of(events).hidden_share    # 0.6: that much of the communication took no time of its own

An all-reduce that a hook calls in the middle of the backward, and that holds the main thread until it is
done, lies within the backward's *span*, but nothing is computed meanwhile:

    main             |  forward  |     backward                  |
                                            | all_reduce |             hidden: nothing

So what the main lane spends in spans of kind "wait" and "communication" does not count as computing. A wait
that leaves no span does: whoever blocks on another thread's work must record it, or it passes as hidden.
Intervals are (start_ns, end_ns) on the events' clock; a list of them is sorted, apart and without empty ones.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.gantt import MAIN_LANE, Event

Interval = tuple[int, int]

COMPUTE = ("compute", "forward", "backward", "weight", "optimizer")
COMMUNICATION = ("communication",)
BLOCKED = ("wait", "communication")  # on the main lane


@dataclass(frozen=True)
class Overlap:
    """Seconds in which a rank computed, communicated, and did both at once."""

    compute_seconds: float
    communication_seconds: float
    hidden_seconds: float

    @property
    def hidden_share(self) -> float | None:
        """Hidden communication per communication, from 0 to 1; None when there was none."""
        return self.hidden_seconds / self.communication_seconds if self.communication_seconds else None


def overlap_of(events: Sequence[Event]) -> Overlap:
    """The overlap in one rank's events. Whatever runs at once, or one within the other, counts once.

    Computing happens on the main lane, communication on any. ValueError for events of several ranks, which
    would hide one rank's communication behind another's computing.
    """
    if len(ranks := {event.rank for event in events}) > 1:
        raise ValueError(f"overlap is one rank's, and these events are of ranks {sorted(ranks)}; pick one")
    main = [event for event in events if event.lane == MAIN_LANE]
    compute = difference(busy(main, COMPUTE), busy(main, BLOCKED))
    communication = busy(events, COMMUNICATION)
    return Overlap(total(compute), total(communication), total(intersection(communication, compute)))


def busy(events: Iterable[Event], kinds: Sequence[str]) -> list[Interval]:
    """When at least one event of these kinds was under way, on any lane."""
    return union(event for event in events if event.kind in kinds)


def union(events: Iterable[Event]) -> list[Interval]:
    """When at least one of the events was under way. Those that touch make one interval."""
    merged: list[Interval] = []
    for start, end in sorted((event.start_ns, event.end_ns) for event in events if event.duration_ns > 0):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What lies in both of two lists as `union` gives them."""
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
    """What lies in `a` but not in `b`, two lists as `union` gives them."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), a[-1][1]]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return intersection(a, gaps)


def total(intervals: Iterable[Interval]) -> float:
    """Their length together, in seconds."""
    return sum(end - start for start, end in intervals) / 1e9


def per_step(events: Iterable[Event], steps: Sequence[Interval]) -> list[list[Event]]:
    """The events that start in each step, in the order given; those outside all steps are left out.

    Steps are (start_ns, end_ns), one after the other. An event belongs whole to the step it starts in, even
    where it reaches into the next.
    """
    starts = [start_ns for start_ns, _ in steps]
    inside: list[list[Event]] = [[] for _ in steps]
    for event in events:
        i = bisect_right(starts, event.start_ns) - 1
        if i >= 0 and event.start_ns < steps[i][1]:
            inside[i].append(event)
    return inside
