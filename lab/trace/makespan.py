"""Measure the steps of a pipeline from their events: how long they take, and what ranks hold meanwhile.

An event that stands for an action has `args` such as {"action": "F", "microbatch": 0, "stage": 2}: F is a
forward, B a backward, and I and W are its halves, the gradients of the input and of the weights.

makespan   from the start of a step's first action, on any rank, to the end of its last one
bubble     the share of that time in which ranks do not compute: 1 - sum of their actions / (p makespan)
held       the most microbatches that a rank keeps for their backwards at a time
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lab.trace.gantt import Event
from lab.trace.observer import Describe

WARMUP_STEPS = 2


def actions_of(stage: int, microbatches: int) -> Describe:
    """Return how a stage's forwards and backwards are described, whose microbatches come in order."""

    def describe(kind: str, number: int) -> dict[str, Any]:
        i = number % microbatches
        return {"name": str(i), "action": kind, "microbatch": i, "stage": stage}

    return describe


def figures_of(events: Iterable[Event], ranks: int) -> dict[str, Any]:
    """Return the rows of a report: medians over the steps after the warm-up, and what each rank holds."""
    steps = steps_of(events)
    steps = steps[min(WARMUP_STEPS, len(steps) // 2) :]
    return {
        "makespan_seconds": statistics.median(map(makespan, steps)),
        "bubble": statistics.median(bubble(step, ranks) for step in steps),
        "microbatches_held": [microbatches_held(steps[0], rank) for rank in range(ranks)],
    }


def steps_of(events: Iterable[Event]) -> list[list[Event]]:
    """Return the actions of each step, of all ranks. In a step a rank does each action once."""
    seen: defaultdict[tuple[int, str, int, int], int] = defaultdict(int)
    steps: defaultdict[int, list[Event]] = defaultdict(list)
    actions = (event for event in events if "action" in event.args)
    for event in sorted(actions, key=lambda event: event.start_ns):
        args = event.args
        key = event.rank, args["action"], args["microbatch"], args["stage"]
        steps[seen[key]].append(event)
        seen[key] += 1
    return list(steps.values())


def makespan(step: list[Event]) -> float:
    """Return the seconds from the start of the first action to the end of the last one."""
    return (max(event.end_ns for event in step) - min(event.start_ns for event in step)) / 1e9


def bubble(step: list[Event], ranks: int) -> float:
    """Return the share of all ranks' time in which they computed nothing, from 0 to 1."""
    return 1 - sum(event.duration_ns for event in step) / 1e9 / (ranks * makespan(step))


def microbatches_held(step: list[Event], rank: int) -> int:
    """Return the most microbatches that the rank holds at a time, counted in each of its stages."""
    now = most = 0
    row = [event for event in step if event.rank == rank]
    for event in sorted(row, key=lambda event: event.start_ns):
        now += event.args["action"] == "F"
        most = max(most, now)
        now -= event.args["action"] in ("B", "W")
    return most
