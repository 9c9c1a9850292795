"""Report a run: makespan and bubble measured, simulated and by formula; activations measured and predicted.

      measured     from the events of all ranks, on one clock
      simulated    the same table, with this run's own seconds for each stage (or the clock's) and its link
      formula      theory.py, for stages that take equally long and messages that take no time; if it has no
                   formula for these f, i and w (ZB-V), each of the three is replaced by their mean

If the three differ, something was less regular than the theory: stages of different lengths, messages that
take time, or ranks that share a core.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from comm.cost import Link
from lab.trace.gantt import Event
from pipeline_parallel.actions import Table, num_microbatches, placement
from pipeline_parallel.activations import ActivationWatch
from pipeline_parallel.analysis import from_events, theory
from pipeline_parallel.analysis.simulate import Costs, Simulation, simulate


class RankFigures(NamedTuple):
    """Holds what one rank tells the others for the report.

    The last three are bytes: of activations by stage (ActivationWatch), and of a message by boundary.
    """

    peak_bytes: int
    peak_held: int
    kept_by_forward: dict[int, int]
    kept_for_weight: dict[int, int]
    boundaries: dict[int, int]

    @classmethod
    def of(cls, watch: ActivationWatch, boundaries: dict[int, int]) -> "RankFigures":
        return cls(
            watch.peak_bytes, watch.peak_held, watch.kept_by_forward, watch.kept_for_weight, boundaries
        )


class Report:
    """Computes the report on rank 0.

    `events` are the actions of all ranks (from_events.py), `seen` the figures of each rank, `tick` the
    seconds of a rank's forward under --metronome, else None.
    """

    def __init__(
        self,
        schedule: str,
        table: Table,
        events: Sequence[Event],
        seen: Sequence[RankFigures],
        link: Link,
        tick: float | None,
    ) -> None:
        self._schedule, self._table, self._seen, self._tick = schedule, table, seen, tick
        self._stages = len(placement(table))
        self.steps = from_events.by_step(events)
        chunks = self._stages // len(table)
        self.costs = (
            from_events.costs(events, self._stages)
            if tick is None
            else Costs.equal(self._stages, *[tick / chunks] * 3)
        )
        sizes = {boundary: size for one in seen for boundary, size in one.boundaries.items()}
        inner = [sizes[boundary] for boundary in range(1, self._stages)]
        self.simulation: Simulation = simulate(table, self.costs, link, inner)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the summary. Bubbles are shares of the makespan; a list has a value for each
        rank.
        """
        ranks, microbatches = len(self._table), num_microbatches(self._table)
        chunks = self._stages // ranks
        of_rank = [
            sum(seconds) / ranks
            for seconds in (self.costs.forward, self.costs.input_gradient, self.costs.weight_gradient)
        ]
        regular = (self._schedule, ranks, microbatches, chunks, *of_rank)
        if theory.makespan(*regular) is None:
            regular = (*regular[:4], *[sum(of_rank) / 3] * 3)
        figures = {
            "makespan_seconds": statistics.median(map(from_events.makespan, self.steps)),
            "makespan_simulated_seconds": self.simulation.makespan,
            "makespan_formula_seconds": theory.makespan(*regular),
            "bubble": statistics.median(from_events.bubble(step, ranks) for step in self.steps),
            "bubble_simulated": self.simulation.bubble,
            "bubble_formula": theory.bubble(*regular),
        }
        if self._tick is None:
            figures |= self._activations(chunks)
        return figures

    def _activations(self, chunks: int) -> dict[str, Any]:
        by_forward, for_weight = [0] * self._stages, [0] * self._stages
        for one in self._seen:
            for stage, size in one.kept_by_forward.items():
                by_forward[stage] = size
            for stage, size in one.kept_for_weight.items():
                for_weight[stage] = size
        ranks, microbatches = len(self._table), num_microbatches(self._table)
        held = [theory.held(self._schedule, ranks, microbatches, chunks, rank) for rank in range(ranks)]
        return {
            "activations_bytes": [one.peak_bytes for one in self._seen],
            "activations_predicted_bytes": self.simulation.peak_bytes(by_forward, for_weight),
            "microbatches_held": [one.peak_held for one in self._seen],
            "microbatches_held_formula": held,
        }
