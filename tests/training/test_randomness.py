"""Test that ranks draw different dropout masks where they compute different things, also after a resume."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from lab.cluster import Cluster
from lab.models.model import SIZES
from lab.ranks import run_ranks
from pipeline_parallel import script
from tests.data_parallel.test_scripts import train
from training.arguments import Args
from training.run import Run


def masks(cluster: Cluster, make: Callable[..., Run], seed: int = 0) -> list[tuple[float, ...]]:
    """Return a dropout mask of each of two steps."""
    run, drawn = make(cluster, seed=seed), []
    for _ in range(2):
        with run.step() as record:
            drawn.append(tuple(F.dropout(torch.ones(64), 0.5).tolist()))
            record.loss = 1.0
    return drawn


def run_of(cluster: Cluster, whole_batch: bool = False, seed: int = 0) -> Run:
    return Run(cluster, Args(size="tiny", batch_size=12, seed=seed), "test", whole_batch=whole_batch)


def stages_of(cluster: Cluster, seed: int = 0) -> Run:
    args = script.Args(size="tiny", batch_size=12, microbatches=2, seed=seed)
    return script.begin(cluster, args, "test")[0]


def test_ranks_with_examples_of_their_own_draw_different_masks():
    by_rank = run_ranks(masks, 3, run_of)
    assert len({mask for of_rank in by_rank for mask in of_rank}) == 3 * 2
    assert by_rank == run_ranks(masks, 3, run_of)
    assert not set(by_rank[0]) & set(run_ranks(masks, 3, run_of, 1)[0])


def test_stages_of_a_pipeline_draw_different_masks():
    assert len({mask for of_rank in run_ranks(masks, 2, stages_of) for mask in of_rank}) == 2 * 2


def test_ranks_that_compute_the_same_draw_the_same_masks():
    first, *others = run_ranks(masks, 3, functools.partial(run_of, whole_batch=True))
    assert all(other == first for other in others)
    assert len(set(first)) == 2


def test_a_resumed_run_with_dropout_ends_with_the_bits_of_one_in_one_go(tmp_path: Path):
    def work(cluster: Cluster) -> list[str]:
        folder = {"checkpoint": str(tmp_path)}
        with mock.patch.dict(SIZES, tiny=dataclasses.replace(SIZES["tiny"], dropout=0.5)):
            parts = [{"steps": 4}, {"steps": 2} | folder, {"steps": 4, "resume": True} | folder]
            return [train(cluster, "naive", **part)["replica_digest"] for part in parts]

    [(at_once, half, resumed)] = set(map(tuple, run_ranks(work, 2)))
    assert resumed == at_once != half
