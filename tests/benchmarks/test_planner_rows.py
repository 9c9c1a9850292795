"""The planner's benchmark measures the plans that could be the best, and sums up what it has measured."""

import pytest

from benchmarks import planner
from benchmarks.planner_steps import Measured
from hybrid_parallel.planner.machine import MACHINES
from hybrid_parallel.planner.search import best_by_division, plans
from hybrid_parallel.planner.shapes import shape_of

FOUND = plans(shape_of("13m"), MACHINES["h100"], 4, 8, "float32")


def test_the_choice_and_the_best_plan_of_each_division_are_measured_once():
    some = planner.selected(FOUND, quick=False)
    assert some[0] == FOUND[0] and len({plan.sizes for plan in some}) == len(some)
    assert {plan.sizes for plan in best_by_division(FOUND)} <= {plan.sizes for plan in some}
    assert planner.selected(FOUND, quick=True) == best_by_division(FOUND)[: planner.QUICK]


def test_errors_are_medians_and_the_choice_is_compared_with_the_fastest_measured_plan():
    def row(plan, factor: float):
        seconds, held = plan.step_seconds * factor, round(plan.memory_bytes / factor)
        ranks = [Measured([seconds / 2] * 3, [1.0] * 3, 0, 0), Measured([seconds] * 3, [2.0] * 3, held, held)]
        return planner.row_of(plan, ranks, "gpt", "1gbit")

    rows = [row(plan, factor) for plan, factor in zip(FOUND[:3], (2.0, 1.0, 1.25), strict=True)]
    assert rows[0]["core_seconds"] == 3 and rows[0]["seconds_error"] == pytest.approx(-0.5)
    said = planner.summary("gpt", rows, 9)
    assert said["median_seconds_error"] == pytest.approx(0.2) == pytest.approx(1 - 1 / 1.25)
    assert said["median_memory_error"] == pytest.approx(0.25, rel=1e-3)
    fastest = min(row["ours"] for row in rows)
    assert (
        said["choice_over_best"] == pytest.approx(rows[0]["ours"] / fastest) and said["choice_over_best"] > 1
    )
