"""Benchmarks compare what trains the same, measure the plans that matter, and have right formulas."""

import pytest
import torch

from benchmarks import planner
from benchmarks.expert_parallel import MOE, formula
from benchmarks.hybrid import LESSONS, WINDOWS, of_the_lesson, on_a_mesh, sizes_of
from comm.cost import pairwise_traffic, traffic
from expert_parallel.config import make_expert
from hybrid_parallel.planner.machine import MACHINES
from hybrid_parallel.planner.search import best_by_division, plans
from hybrid_parallel.planner.shapes import shape_of
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.replace import replaced


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_formula_is_what_collectives_send_if_all_experts_are_chosen_equally(ranks: int):
    width, tokens = 64, 256
    to_each = tokens * MOE.top_k // ranks * width
    there_and_back = 4 * pairwise_traffic([to_each] * ranks, 4, 0).bytes_sent
    weights = [p for p in make_expert(GPTConfig(width=width), 0, 0, 0).parameters() if p.dim() == 2]
    numel = MOE.num_experts * sum(weight.numel() for weight in weights)  # biases are left out
    averaged = traffic("all_reduce", "ring", numel, 4, ranks, 0).bytes_sent
    assert formula(width, tokens, ranks) == (there_and_back, averaged)


@pytest.mark.parametrize("width", [64, 256])
def test_both_sides_send_equally_much_at_the_crossover(width: int):
    for factor in (0.25, 1, 4):
        tokens = int(factor * 4 * MOE.num_experts * width / MOE.top_k)
        ours, theirs = formula(width, tokens, 4)
        assert ours / theirs == factor


STEPS, RANKS = 2, 2


def losses(cluster: Cluster) -> dict[str, list[list[float]]]:
    """Return the losses of both sides in each step, with a tiny GPT."""
    config = GPTConfig.named("tiny")
    text = torch.randint(256, (WINDOWS, config.block_size + 1), generator=torch.Generator().manual_seed(1))
    found = {}
    with (
        replaced("benchmarks.hybrid.new_gpt", lambda _: GPT(config)),
        replaced("benchmarks.hybrid.tokens", lambda *_: (text[:, :-1], text[:, 1:])),
    ):
        for what in LESSONS:
            steps = on_a_mesh(cluster, what), of_the_lesson(cluster, what)
            found[what] = [[float(step()) for _ in range(STEPS)] for step in steps]
    return found


def test_both_sides_train_the_same():
    for rank in run_ranks(losses, RANKS):
        for what, (mesh, lesson) in rank.items():
            factor = RANKS if what == "pipeline" else 1  # there a rank's loss is one term of a sum over ranks
            assert mesh == pytest.approx([factor * loss for loss in lesson], rel=1e-6), what  # float32
            assert mesh[-1] < mesh[0]


@pytest.mark.parametrize("what", LESSONS)
def test_each_axis_has_all_ranks(what: str):
    sizes = sizes_of(what, 4)
    assert sizes.world_size == 4
    assert 4 in (sizes.pipeline, sizes.data, sizes.context, sizes.tensor)
    assert what != "experts" or sizes.expert_ranks == 4


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
