"""Simulating a schedule. Write `simulate` of pipeline_parallel/simulate.py.

Check it with `python -m exercises check simulator`.
"""

from collections.abc import Sequence

from comm.cost import Link
from pipeline_parallel.actions import Action, Table, as_dependency, dependencies, is_forward_only, placement
from pipeline_parallel.simulate import Costs, Simulation, TimedAction, _taker
from pipeline_parallel.validate import validate


def simulate(
    table: Table, costs: Costs, link: Link | None = None, message_bytes: int | Sequence[int] = 0
) -> Simulation:
    """Return the timeline of `table`, as a Simulation with a row of TimedActions for each rank.

    The rules are at the top of pipeline_parallel/simulate.py. `costs.seconds(action)` is how long an
    action takes, and `dependencies(action, last stage)` are the results that it needs. A result has
    the name `as_dependency(action)`, and `_taker(action)` is the stage that gets it. `message_bytes`
    is the size of an activation and of its gradient: one number, or one for each boundary between
    stages, beginning with that of stages 0 and 1. Begin all times with 0, not 0.0, so that fractions
    stay exact.

    ValueError if costs or sizes are not for the stages of the table: "The table has 2 stages, but the
    costs are for 3." and "2 stages have 1 boundaries, not 3: give one size for each." For a table
    that would never end, `validate(table, trains=not is_forward_only(table))` raises ScheduleError.
    """
    raise NotImplementedError("Simulating a schedule is not written yet: `simulate` has no body.")
