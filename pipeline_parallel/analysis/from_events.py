"""Read a run of a pipeline from its events: the steps, the table that was run, the seconds of each stage.

The events are the actions of all ranks on one clock, as a run with --trace writes them into trace.json.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.trace.gantt import Event
from lab.trace.makespan import makespan, steps_of
from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Table,
    num_microbatches,
    placement,
)
from pipeline_parallel.analysis.simulate import Costs
from pipeline_parallel.schedules import SCHEDULES, table_of


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


def table_from(step: Iterable[Event]) -> Table:
    """Return the table that the ranks have run in a step."""
    table: Table = []
    for event in sorted(step, key=lambda event: event.start_ns):
        table += [[] for _ in range(event.rank + 1 - len(table))]
        table[event.rank].append(Action(event.args["action"], event.args["microbatch"], event.args["stage"]))
    return table


def name_of(table: Table) -> str | None:
    """Return the name of the schedule that makes this table; None if there is none."""
    ranks, microbatches, chunks = len(table), num_microbatches(table), len(placement(table)) // len(table)
    return next((name for name in SCHEDULES if table_of(name, ranks, microbatches, chunks) == table), None)


def steps_of_trace(path: Path) -> list[list[Event]]:
    """Return the actions of each step of a `trace.json`; times are those of the trace."""
    rows = json.loads(path.read_text())["traceEvents"]
    ranks = {row["pid"]: int(row["args"]["name"].split()[1]) for row in rows if row["name"] == "process_name"}
    actions = [
        Event(
            row["name"], row["cat"], round(row["ts"] * 1000), round(row["dur"] * 1000), args=row["args"],
            rank=ranks[row["pid"]],
        )
        for row in rows
        if "action" in row["args"]
    ]  # fmt: skip
    return steps_of(actions)


def median_step(steps: Sequence[list[Event]]) -> list[Event]:
    """Return the step of median makespan; of two, the shorter one."""
    return sorted(steps, key=makespan)[(len(steps) - 1) // 2]
