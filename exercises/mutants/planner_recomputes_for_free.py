"""The planner always recomputes: the second forward saves memory, and its time is not counted."""

from hybrid_parallel.planner.seconds import Pass
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes

TARGET = "hybrid_parallel.planner.time_model.TimeModel.layer"
KILLER = "tests.hybrid_parallel.test_planner_time.test_recomputation_adds_a_third_to_the_layers"
CAUSE = "costs a second forward"


def mutant(self: TimeModel, sizes: ParallelSizes) -> tuple[Pass, Pass, Pass]:
    compute, tensor = self._compute(sizes), self._collectives(sizes)
    return Pass(compute, tensor), Pass(compute, tensor), Pass(compute, 0.0)
