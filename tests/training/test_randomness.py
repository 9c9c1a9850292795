"""Ranks draw different dropout masks where they compute different things, and the same ones elsewhere."""

from unittest import mock

import torch
import torch.nn.functional as F

from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.run_modes import without_measuring
from tests.training.attempts import train
from training.arguments import Args
from training.run import Run


def masks(cluster: Cluster, seed: int = 0) -> list[tuple[float, ...]]:
    """Return a dropout mask of each of two steps."""
    drawn = []
    with without_measuring():
        run = Run(cluster, Args(steps=2, size="tiny", batch_size=12, seed=seed), "test")
        model = run.model()
        for _ in run.batches(model, run.optimizer(model)):
            drawn.append(tuple(F.dropout(torch.ones(64), 0.5).tolist()))
            run.record(torch.ones(()))
    return drawn


def test_ranks_with_examples_of_their_own_draw_different_masks():
    by_rank, again, of_another_seed = zip(
        *run_ranks(lambda cluster: [masks(cluster, seed) for seed in (0, 0, 1)], 3), strict=True
    )
    assert len({mask for of_rank in by_rank for mask in of_rank}) == 3 * 2
    assert by_rank == again
    assert not set(by_rank[0]) & set(of_another_seed[0])


def test_stages_draw_different_masks_and_ranks_that_compute_the_same_draw_the_same():
    streams = {"zero3": 2, "pipeline_1f1b": 2, "tensor_parallel": 1}

    def work(cluster: Cluster) -> dict[str, int]:
        found = {}
        for mode in streams:
            with mock.patch("training.run.seed_step") as seeding:
                train(cluster, mode, steps=1)
            [found[mode]] = {call.args[2] for call in seeding.call_args_list}
        return found

    one, other = run_ranks(work, 2)
    assert {mode: len({one[mode], other[mode]}) for mode in streams} == streams
