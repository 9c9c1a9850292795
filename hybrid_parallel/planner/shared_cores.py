"""Simulate a pipeline on too few cores: ranks that compute at the same time slow each other down.

      2 ranks, 2 cores   rank 0  F0 F1 .  .  B0--- .  B1---            9 seconds: idle ranks cost time
                         rank 1  .  F0 B0--- F1 B1--- .  .

      2 ranks, 1 core    rank 0  F0 F1--- .  .  B0--------- .  B1---   12 seconds: while rank 0 is idle,
                         rank 1  .  F0--- B0--- F1--- B1------ .  .    rank 1 is twice as fast

If each rank has a core, a step takes as long as the longest chain of actions
(pipeline_parallel/analysis/simulate.py). On shared cores, n ranks that compute at the same time get cores / n
of a core each, because Linux divides the cores equally. So the idle time of a rank is not lost: other ranks
use it.
"""

from operator import add

from comm.cost import Link
from pipeline_parallel.actions import (
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Table,
    as_dependency,
    dependencies,
    placement,
)
from pipeline_parallel.analysis.simulate import Costs, simulate

_NEVER = float("inf")
_DONE = 1e-12  # seconds of a core: what remains is a rounding error


def makespan(
    table: Table, work: Costs, waiting: Costs, cores: float, link: Link, message_bytes: int
) -> float:
    """Return the seconds of a step of `table` on ranks that share `cores`.

    An action takes `work` seconds of a core, and then `waiting` seconds in which it needs none. Each message
    between two ranks has `message_bytes`.
    """
    if cores >= len(table):
        both = (map(add, *costs) for costs in zip(vars(work).values(), vars(waiting).values(), strict=True))
        return simulate(table, Costs(*map(tuple, both)), link, message_bytes).makespan
    return _Simulation(table, work, waiting, link, message_bytes).run(cores)


class _Simulation:
    """Holds the state of each rank. `left` is the work of its action that remains; None if none has begun."""

    def __init__(self, table: Table, work: Costs, waiting: Costs, link: Link, message_bytes: int) -> None:
        self.table, self.work, self.waiting = table, work, waiting
        self.link, self.message_bytes = link, message_bytes
        self.rank_of = placement(table)
        self.last_stage = max(self.rank_of)
        self.now = 0.0
        self.position = [0] * len(table)  # index of each rank's next action in its row
        self.left: list[float | None] = [None] * len(table)
        self.free = [0.0] * len(table)  # when the rank is free: the collectives of its last action have ended
        self.link_free = [0.0] * len(table)
        self.arrives: dict[Action, float] = {}

    def run(self, cores: float) -> float:
        """Go from one event to the next one until all rows are done, and return the time."""
        while any(at < len(row) for at, row in zip(self.position, self.table, strict=True)):
            starts = [self._begin(rank) for rank in range(len(self.table))]
            busy = [rank for rank, left in enumerate(self.left) if left is not None]
            speed = min(1.0, cores / max(1, len(busy)))
            ends = [self.now + left / speed for left in self.left if left is not None]
            before, self.now = self.now, min([*starts, *ends])
            for rank in busy:
                left = self.left[rank]
                assert left is not None
                self.left[rank] = left - (self.now - before) * speed
                if self.left[rank] <= _DONE:
                    self._end(rank)
        return max(self.free)

    def _begin(self, rank: int) -> float:
        """Begin the rank's next action if it can. Return the later time when it can, if known, or _NEVER."""
        at, row = self.position[rank], self.table[rank]
        if self.left[rank] is not None or at == len(row):
            return _NEVER
        # A result of the same stage was there before the rank was last free.
        needed = [need for need in dependencies(row[at], self.last_stage) if need.stage != row[at].stage]
        start = max([self.free[rank], *(self.arrives.get(need, _NEVER) for need in needed)])
        if start > self.now:
            return start
        self.left[rank] = self.work.seconds(row[at])
        return _NEVER

    def _end(self, rank: int) -> None:
        """End the rank's action, and send its result."""
        action = self.table[rank][self.position[rank]]
        self.left[rank] = None
        self.position[rank] += 1
        end = self.free[rank] = self.now + self.waiting.seconds(action)
        taker = action.stage + (1 if action.kind == FORWARD else -1)
        self.arrives[as_dependency(action)] = end
        if action.kind != WEIGHT_GRADIENT and self.rank_of.get(taker, rank) != rank:
            self.link_free[rank] = max(end, self.link_free[rank]) + self.message_bytes * self.link.beta
            self.arrives[as_dependency(action)] = self.link_free[rank] + self.link.alpha
