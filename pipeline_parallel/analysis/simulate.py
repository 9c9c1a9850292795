"""Simulate a schedule: predict its timeline from the seconds of each stage, without running it.

    rank 0   F0 F1 .  .  B0--- F2 B1--- .  B2---     simulate(one_f_one_b(2, 3), Costs.equal(2, 1, 1, 1))
    rank 1   .  F0 B0--- F1 B1--- F2 B2--- .  .      makespan 12 seconds, 3 of them idle: a bubble of 0.25

Each rank does its row in order. An action starts when the rank is free and all messages that it needs have
arrived. The first action starts at time 0. Receiving takes no time, and sending does not delay computing:

    the action ends ──> departs when the rank's earlier messages are out ── bytes * beta ── alpha ──> arrives
                        └────────── the link is busy ─────────────────────────────────────┘

So a rank has one outgoing link, which sends its messages one after the other in the order of its actions. The
latency alpha delays a message, but not the messages behind it (Hockney's alpha and beta, as in `comm.cost`).
A message between two stages of one rank takes no time, and without `link` all messages take none.

Stages may be unequal, links slow, and any table is accepted; theory.py has formulas for the regular cases.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from comm.cost import Link
from lab.trace.gantt import Event
from pipeline_parallel.actions import (
    BACKWARD,
    FORWARD,
    GANTT_KIND,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Table,
    as_dependency,
    dependencies,
    placement,
)
from pipeline_parallel.analysis.validate import held, in_order, validate
from pipeline_parallel.messages import sent_by


@dataclass(frozen=True)
class Costs:
    """Holds the seconds of one microbatch, by stage. A backward takes the seconds of both gradients."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]

    @classmethod
    def equal(cls, stages: int, forward: float, input_gradient: float, weight_gradient: float) -> "Costs":
        """Return the same seconds for each of `stages` stages."""
        return cls((forward,) * stages, (input_gradient,) * stages, (weight_gradient,) * stages)

    @classmethod
    def measured(cls, events: Iterable[Event], stages: int) -> "Costs":
        """Return the median seconds of actions that ran. Half of a backward counts for each gradient."""
        seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for event in events:
            kind, stage = event.args["action"], event.args["stage"]
            for half in (INPUT_GRADIENT, WEIGHT_GRADIENT) if kind == BACKWARD else (kind,):
                seconds[half, stage].append(event.duration_ns / (2e9 if kind == BACKWARD else 1e9))
        kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
        return cls(*(tuple(median(seconds[kind, s]) for s in range(stages)) for kind in kinds))

    def seconds(self, action: Action) -> float:
        """Return how long the action takes."""
        kind, _, stage = action
        if kind == FORWARD:
            return self.forward[stage]
        if kind == BACKWARD:
            return self.input_gradient[stage] + self.weight_gradient[stage]
        return (self.input_gradient if kind == INPUT_GRADIENT else self.weight_gradient)[stage]


class TimedAction(NamedTuple):
    """Holds an action, and its start and end in seconds since time 0."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Holds what each rank did, and when."""

    rows: list[list[TimedAction]]

    @classmethod
    def measured(cls, events: Iterable[Event]) -> "Simulation":
        """Return what ranks really did, from the events of one step; time 0 is the first one's start."""
        events = sorted(events, key=lambda event: event.start_ns)
        zero = events[0].start_ns
        rows: list[list[TimedAction]] = [[] for _ in range(1 + max(event.rank for event in events))]
        for event in events:
            action = Action(event.args["action"], event.args["microbatch"], event.args["stage"])
            times = (event.start_ns - zero) / 1e9, (event.end_ns - zero) / 1e9
            rows[event.rank].append(TimedAction(action, *times))
        return cls(rows)

    @property
    def table(self) -> Table:
        """Return the table that the ranks have run."""
        return [[timed.action for timed in row] for row in self.rows]

    @property
    def makespan(self) -> float:
        """Return the seconds from the first action's start to the last one's end."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def busy(self) -> list[float]:
        """Return the seconds in which each rank computed."""
        return [sum(timed.end - timed.start for timed in row) for row in self.rows]

    @property
    def bubble(self) -> float:
        """Return the share of all ranks' time in which they did nothing, from 0 to 1."""
        available = len(self.rows) * self.makespan
        return 1 - sum(self.busy) / available if available else 0.0

    @property
    def peak_held(self) -> list[int]:
        """Return the most microbatches that each rank held at a time, counted in each of its stages."""
        return [max(held(row), default=0) for row in self.table]

    def events(self) -> list[Event]:
        """Return one event for each action, with its microbatch as its name, for `lab.trace.gantt.draw`."""
        stages_of = [sorted({action.stage for action in row}) for row in self.table]
        chunk_of = {stage: chunk for stages in stages_of for chunk, stage in enumerate(stages)}
        # Start and end are rounded, not the length, so that events that touch still touch.
        return [
            Event(
                name=str(microbatch),
                kind=GANTT_KIND[kind],
                start_ns=round(start * 1e9),
                duration_ns=round(end * 1e9) - round(start * 1e9),
                args={"action": kind, "microbatch": microbatch, "stage": stage, "chunk": chunk_of[stage]},
                rank=rank,
            )
            for rank, row in enumerate(self.rows)
            for (kind, microbatch, stage), start, end in row
        ]


def simulate(table: Table, costs: Costs, link: Link | None = None, message_bytes: int = 0) -> Simulation:
    """Return the timeline of `table`. ScheduleError for a table that would never end.

    `message_bytes` is the size of an activation and of its gradient, at each boundary between stages.
    """
    rank_of = placement(table)
    last_stage = max(rank_of, default=-1)
    rows: list[list[TimedAction]] = [[] for _ in table]
    free: list[float] = [0] * len(table)  # when the rank is free; 0, not 0.0, so that fractions stay exact
    link_free: list[float] = [0] * len(table)  # when the messages of the rank are out
    arrives: dict[Action, float] = {}  # when a result is there, by its name as a dependency
    for rank, action in in_order(table):
        # A result of the same stage was there before the rank was last free.
        needed = [need for need in dependencies(action, last_stage) if need.stage != action.stage]
        start = max([free[rank], *(arrives[need] for need in needed)])
        end = free[rank] = start + costs.seconds(action)
        rows[rank].append(TimedAction(action, start, end))
        arrives[as_dependency(action)] = end
        message = sent_by(action, last_stage)
        if link is not None and message is not None and rank_of[message.receiver] != rank:
            link_free[rank] = max(end, link_free[rank]) + message_bytes * link.beta
            arrives[as_dependency(action)] = link_free[rank] + link.alpha
    if any(len(done) < len(row) for row, done in zip(table, rows, strict=True)):
        validate(table)
    return Simulation(rows)
