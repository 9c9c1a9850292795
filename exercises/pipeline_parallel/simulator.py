"""Simulating a schedule. Write `simulate` of pipeline_parallel/analysis/simulate.py.

Read notebooks/08_pipelines.ipynb first. Do not open pipeline_parallel/analysis/simulate.py yet: it contains
the solution.

Simulate a schedule: predict its timeline from the seconds of each stage, without running it.

    rank 0   F0 F1 .  .  B0--- F2 B1--- .  B2---     simulate(one_f_one_b(2, 3), Costs.equal(2, 1, 1, 1))
    rank 1   .  F0 B0--- F1 B1--- F2 B2--- .  .      makespan 12 seconds, 3 of them idle: a bubble of 0.25

Each rank does its row in order. An action starts when the rank is free and all messages that it needs have
arrived. The first action starts at time 0. Receiving takes no time, and sending does not delay computing:

    the action ends ──> departs when the rank's earlier messages are out ── bytes * beta ── alpha ──> arrives
                        └────────── the link is busy ─────────────────────────────────────┘

So a rank has one outgoing link, which sends its messages one after the other in the order of its actions. The
latency alpha delays a message, but not the messages behind it (Hockney's alpha and beta, as in `comm.cost`).
A message between two stages of one rank takes no time, and without `link` all messages take none.

Stages may be unequal, links slow, and any table is accepted; `pipeline_parallel.analysis.theory` has formulas
for the regular cases. The simulator looks at each action a constant number of times, so thousands of ranks
take seconds.

You may use:

    _taker(action: Action) -> int
        Return the stage that receives the result.
    Action(kind: str, microbatch: int, stage: int)
        Holds one action: a forward, a backward or half of a backward, of one microbatch in one stage.
    as_dependency(action: Action) -> Action
        Return the name that `dependencies` has for the action: a B is listed as the I that it
        contains.
    Costs(forward: tuple[float, ...], input_gradient: tuple[float, ...], weight_gradient: tuple[float,
            ...])
        Holds the seconds of one microbatch, by stage.
    costs.seconds(action: Action) -> float
        Return how long the action takes.
    dependencies(action: Action, last_stage: int) -> Iterable[Action]
        Return the actions, of this rank or another, that must end before this action can begin.
    is_forward_only(table: Table) -> bool
        Return whether the table has only forwards, as for evaluation (schedules.forward_only).
    Link(alpha: float, beta: float)
        The speed of a link: alpha in seconds per message, beta in seconds per byte.
    placement(table: Table) -> dict[int, int]
        Return the rank of each stage; the stages are in order.
    Simulation(rows: list[list[TimedAction]])
        Holds what each rank did, and when.
    Table = list[list[Action]]
    TimedAction(action: Action, start: float, end: float)
        Holds an action, and its start and end in seconds since time 0.
    validate(table: Table, max_held: int | Sequence[int] | None = None, trains: bool = True) -> None
        Raise ScheduleError unless the table trains every stage on every microbatch, and comes to its
        end.
    costs.forward: tuple[float, ...], costs.input_gradient: tuple[float, ...], costs.weight_gradient:
    tuple[float, ...]

Check it with `python -m exercises check simulator`.
"""

from collections.abc import Sequence

from comm.cost import Link
from pipeline_parallel.actions import Action, Table, as_dependency, dependencies, is_forward_only, placement
from pipeline_parallel.analysis.simulate import Costs, Simulation, TimedAction, _taker
from pipeline_parallel.analysis.validate import validate


def simulate(
    table: Table, costs: Costs, link: Link | None = None, message_bytes: int | Sequence[int] = 0
) -> Simulation:
    """Return the timeline of `table`, as a Simulation with a row of TimedActions for each rank.

    The rules stand above. `costs.seconds(action)` is how long an
    action takes, and `dependencies(action, last stage)` are the results that it needs. A result has
    the name `as_dependency(action)`, and `_taker(action)` is the stage that gets it. `message_bytes`
    is the size of an activation and of its gradient: one number, or one for each boundary between
    stages, beginning with that of stages 0 and 1. Begin all times with 0, not 0.0, so that fractions
    stay exact.

    ValueError if costs or sizes are not for the stages of the table: "The table has 2 stages, but the
    costs are for 3." and "2 stages have 1 boundaries, not 3: give one size for each." For a table
    that would never end, `validate(table, trains=not is_forward_only(table))` raises ScheduleError.
    """
    raise NotImplementedError("`simulate` is not written yet.")
