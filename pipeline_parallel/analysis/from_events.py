"""Compute the seconds of each stage, and the makespan and bubble of each step, from the events of a run.

The events are the actions of all ranks on one clock (`timeline.gather_events`), and `args["step"]` is the
number of the step. The makespan of a step is the time from the start of its first action, on any rank, to the
end of its last one. The bubble is the share of that time in which ranks do not compute.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from lab.trace.gantt import Event
from pipeline_parallel.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from pipeline_parallel.analysis.simulate import Costs


def by_step(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each step; the steps are in order."""
    steps: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        steps[event.args["step"]].append(event)
    return [steps[step] for step in sorted(steps)]


def makespan(step: Sequence[Event]) -> float:
    """Return the seconds from the start of the first action to the end of the last one."""
    return (max(event.end_ns for event in step) - min(event.start_ns for event in step)) / 1e9


def bubble(step: Sequence[Event], ranks: int) -> float:
    """Return the share of all ranks' time in which they computed nothing, from 0 to 1."""
    busy = sum(event.duration_ns for event in step) / 1e9
    return 1 - busy / (ranks * makespan(step))


def median_step(steps: Sequence[Sequence[Event]]) -> Sequence[Event]:
    """Return the step of median makespan; of two, the shorter one."""
    return sorted(steps, key=makespan)[(len(steps) - 1) // 2]


def costs(events: Iterable[Event], stages: int) -> Costs:
    """Return the median seconds of each stage's actions. Half of a backward counts for each gradient."""
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        seconds[event.args["action"], event.args["stage"]].append(event.duration_ns / 1e9)

    def median(kind: str, stage: int) -> float:
        if kind != FORWARD and (kind, stage) not in seconds:
            return statistics.median(seconds[BACKWARD, stage]) / 2
        return statistics.median(seconds[kind, stage])

    return Costs(
        *(
            tuple(median(kind, stage) for stage in range(stages))
            for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
        )
    )
