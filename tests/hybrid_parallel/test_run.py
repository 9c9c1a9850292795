"""The train script of the hybrid lesson, as users run it."""

import dataclasses
from typing import Any

import pytest

from hybrid_parallel import train_hybrid
from hybrid_parallel.arguments import HybridArgs, sizes_of
from hybrid_parallel.mesh import AXES
from hybrid_parallel.planner.auto import choose_sizes
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.run_modes import without_measuring
from training.run import Run

ARGS = HybridArgs(steps=3, batch_size=8, size="tiny", layers=4, json=True)


def summaries(world_size: int, ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rank 0's summary of a short run in each way."""

    def work(cluster: Cluster) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        finish = Run.finish
        Run.finish = lambda self, *args, **extras: found.append(finish(self, *args, **extras))  # type: ignore
        with without_measuring():
            for way in ways:
                train_hybrid.main(cluster, dataclasses.replace(ARGS, **way))
        return found

    return run_ranks(work, world_size)[0]


def assert_equal_replicas_and_traffic(one: dict) -> None:
    assert one["replicas_equal"]
    axes = [axis for axis in AXES if one[f"axis_{axis}"] > 1]
    for what in ("bytes", "messages"):
        assert one[f"{what}_sent"] == one[f"{what}_formula"]
        assert one[f"{what}_sent"] == sum(one[f"axis_{axis}_{what}_sent"][0] for axis in axes)
        for axis in axes:
            assert one[f"axis_{axis}_{what}_sent"] == one[f"axis_{axis}_{what}_formula"], one


def test_every_way_trains_the_same_model_also_in_16_bits():
    [alone] = summaries(1, [{}])
    for one in summaries(2, [{"tensor": 2, "sequence_parallel": True}, {"zero": 2, "precision": "bf16"}]):
        assert_equal_replicas_and_traffic(one)
        tolerance = 1e-2 if one["axis_precision"] == "bf16" else 1e-4
        for loss in ("first_loss", "last_loss", "validation_loss"):
            assert one[loss] == pytest.approx(alone[loss], rel=tolerance), one


def test_ways_to_send_less_keep_tensor_ranks_and_replicas_equal_and_send_what_the_formulas_say():
    compressed = [{"compress": name, "tensor": 2} for name in ("int8", "topk", "powersgd")]
    alone = {"sync_every": 2, "ignore_first": 3, "clip": 1.0}  # averages after two of three steps
    in_full, *others = summaries(4, [{"tensor": 2}, *compressed, alone | {"pipeline": 2}])
    for one in others:
        assert_equal_replicas_and_traffic(one)
        most = {"int8": 0.30, "topk": 0.06, "powersgd": 0.5, None: 0.8}[one["axis_compress"]]
        assert one["axis_data_bytes_sent"][0] < most * in_full["axis_data_bytes_sent"][0], one


def test_the_report_counts_the_same_choices_and_dropped_tokens_on_every_mesh_with_the_same_replicas():
    experts = {"experts": 4, "capacity": 0.8, "recompute": False}
    stages = {"pipeline": 2, "microbatches": 1, "recompute": True}
    [alone] = summaries(1, [experts])
    assert alone["dropped_tokens"] > 0 and alone["imbalance"] > 1
    for one in summaries(2, [experts | {"tensor": 2}, experts | stages]):
        assert_equal_replicas_and_traffic(one)
        assert (one["dropped_tokens"], one["imbalance"]) == (alone["dropped_tokens"], alone["imbalance"]), one
        assert one["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-4)


def test_without_sizes_the_ranks_are_stages_tensor_ranks_and_replicas_and_sizes_override_that():
    def axes(ranks: int, **given: int) -> tuple[int, ...]:
        sizes = sizes_of(dataclasses.replace(ARGS, **given), ranks)
        return sizes.pipeline, sizes.data, sizes.tensor, sizes.microbatches

    found = {ranks: axes(ranks) for ranks in (1, 2, 3, 4, 6, 8)}
    mesh = {2: (2, 1, 1, 8), 4: (2, 1, 2, 8), 6: (2, 3, 1, 2), 8: (2, 2, 2, 4)}
    assert found == {1: (1, 1, 1, 1), 3: (1, 3, 1, 1)} | mesh
    assert axes(4, tensor=2) == (1, 2, 2, 1) and axes(4, zero=3) == (1, 4, 1, 1) == axes(4, data=4)
    assert axes(4, sync_every=8) == (1, 4, 1, 1)
    assert axes(4, microbatches=2) == (2, 1, 2, 2)


def test_the_planner_chooses_the_same_sizes_on_all_ranks_and_keeps_what_is_given():
    def chosen(cluster: Cluster) -> list[ParallelSizes]:
        args = HybridArgs(batch_size=16, size="tiny", layers=4)
        return [choose_sizes(cluster, args, given) for given in ({}, {"pipeline": 2})]

    of_rank_0, of_rank_1 = run_ranks(chosen, 2)
    assert of_rank_0 == of_rank_1
    free, given = of_rank_0
    assert free.world_size == given.world_size == given.pipeline == 2
