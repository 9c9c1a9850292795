"""The benchmark of the mesh: a step on a mesh trains what the step of the axis's lesson trains."""

import pytest
import torch

from benchmarks import hybrid, hybrid_steps
from benchmarks.hybrid import rows_of
from benchmarks.hybrid_steps import LESSONS, WINDOWS, of_the_lesson, on_a_mesh
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.replace import replaced

STEPS, RANKS = 3, 2
TERMS = ("pipeline",)  # a rank's loss is one term of a sum over ranks


def losses(cluster: Cluster) -> dict[str, list[list[float]]]:
    """Return the losses of both sides in each step, with a tiny GPT."""
    config = GPTConfig.named("tiny")
    tokens = torch.randint(256, (WINDOWS, config.block_size + 1), generator=torch.Generator().manual_seed(1))
    found = {}
    with (
        replaced("benchmarks.hybrid_steps.model_as_made", lambda: GPT(config)),
        replaced("benchmarks.hybrid_steps.text", lambda _: (tokens[:, :-1], tokens[:, 1:])),
    ):
        for what in LESSONS:
            steps = on_a_mesh(cluster, what), of_the_lesson(cluster, what)
            found[what] = [[float(step()) for _ in range(STEPS)] for step in steps]
    return found


def test_both_sides_train_the_same():
    for rank in run_ranks(losses, RANKS):
        for what, (mesh, lesson) in rank.items():
            factor = RANKS if what in TERMS else 1
            assert mesh == pytest.approx([factor * loss for loss in lesson], rel=1e-6), what  # float32
            assert mesh[-1] < mesh[0]


def test_each_axis_has_all_ranks():
    for what in LESSONS:
        sizes = hybrid_steps.sizes_of(what, 4)
        assert sizes.world_size == 4
        assert 4 in (sizes.pipeline, sizes.data, sizes.context, sizes.tensor)
    assert {hybrid_steps.sizes_of(f"context {how}", 4).attention for how in ("ring", "all_to_all")} == {
        "ring",
        "all_to_all",
    }
    assert hybrid_steps.sizes_of("experts", 4).expert_ranks == 4


def test_a_row_compares_the_mesh_with_the_lesson(monkeypatch: pytest.MonkeyPatch):
    def rank(mesh: float, lesson: float) -> dict[str, dict[str, list[float]]]:
        return {what: {"mesh": [mesh], "lesson": [lesson]} for what in LESSONS}

    monkeypatch.setattr(hybrid, "run_ranks", lambda *_, **__: [rank(1.0, 3.0), rank(2.0, 4.0)])
    rows = {row["what"]: row for row in rows_of(2, 1, 1)}
    assert rows["hybrid context ring"]["against"] == "context_ring"
    assert rows["hybrid experts"]["against"] == "expert_parallel"
    assert all(row["ratio"] == 0.5 for row in rows.values()) and len(rows) == len(LESSONS)
