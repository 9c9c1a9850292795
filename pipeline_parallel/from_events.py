"""What a run's spans say about its pipeline: seconds of each stage, makespan and bubble of each step.

The events are the actions' of all ranks on one clock (lab.timeline.gather); `args["step"]` is the number of
the step. The makespan of a step lasts from its first action's start, on whatever rank, to its last one's
end; what a rank does not compute of it is its bubble.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from lab.gantt import Event
from pipeline_parallel.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from pipeline_parallel.simulate import Costs


def by_step(events: Iterable[Event]) -> list[list[Event]]:
    """The events of each step, in order."""
    steps: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        steps[event.args["step"]].append(event)
    return [steps[step] for step in sorted(steps)]


def makespan(step: Sequence[Event]) -> float:
    """Seconds from the first action's start to the last one's end."""
    return (max(event.end_ns for event in step) - min(event.start_ns for event in step)) / 1e9


def bubble(step: Sequence[Event], ranks: int) -> float:
    """The share of all ranks' time in which they computed nothing, from 0 to 1."""
    busy = sum(event.duration_ns for event in step) / 1e9
    return 1 - busy / (ranks * makespan(step))


def median_step(steps: Sequence[Sequence[Event]]) -> Sequence[Event]:
    """The step of median makespan, the lower one of two."""
    return sorted(steps, key=makespan)[(len(steps) - 1) // 2]


def costs(events: Iterable[Event], stages: int) -> Costs:
    """Median seconds of each stage's actions. A whole backward counts half for each gradient."""
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
