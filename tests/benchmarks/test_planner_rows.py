"""The planner's benchmark measures the plans that could be the best, and sums up what it has measured."""

import pytest

from benchmarks import planner
from hybrid_parallel.planner.machine import MACHINES
from hybrid_parallel.planner.search import best_by_division, plans
from hybrid_parallel.planner.shapes import shape_of

FOUND = plans(shape_of("13m"), MACHINES["h100"], 4, 8, precision="float32")


def test_the_choice_and_the_best_plan_of_each_division_are_measured_once():
    some = planner.selected(FOUND, quick=False)
    assert some[0] == FOUND[0] and len({plan.sizes for plan in some}) == len(some)
    assert {plan.sizes for plan in best_by_division(FOUND)} <= {plan.sizes for plan in some}
    assert planner.selected(FOUND, quick=True) == best_by_division(FOUND)[: planner.QUICK]


def test_errors_are_medians_and_the_choice_is_compared_with_the_fastest_measured_plan():
    rows = []
    for plan, factor in zip(FOUND[:3], (2.0, 1.0, 1.25), strict=True):
        seconds, held = plan.step_seconds * factor, round(plan.memory.total / factor)
        rows += planner.rows_of(plan, [([seconds / 2] * 3, 0), ([seconds] * 3, held)])
    said = planner.summary(rows)
    assert said["median_seconds_error"] == pytest.approx(1 - 1 / 1.25)
    assert said["median_memory_error"] == pytest.approx(0.25, rel=1e-3)
    fastest = min(row["ours"] for row in rows[::2])
    assert said["choice_over_best"] == pytest.approx(rows[0]["ours"] / fastest) != 1
