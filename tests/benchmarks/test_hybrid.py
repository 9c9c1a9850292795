"""The benchmark of the mesh: a step on a mesh trains what the step of the axis's lesson trains."""

import pytest
import torch

from benchmarks.hybrid import LESSONS, WINDOWS, of_the_lesson, on_a_mesh, sizes_of
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.replace import replaced

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
