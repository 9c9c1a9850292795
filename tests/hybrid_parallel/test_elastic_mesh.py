"""Wherever a rank of a mesh dies, the survivors end where an undisturbed process ends: state and moments."""

import dataclasses
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_parallel import train_elastic_mesh
from hybrid_parallel.checkpoint import BackgroundCheckpoints
from hybrid_parallel.run import Run
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.state import pieces_of
from hybrid_parallel.survivors import Survivors
from hybrid_parallel.train_elastic_mesh import ElasticMeshArgs, sizes_for
from lab.check import assert_same
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.ranks import RankError, run_ranks

ARGS = ElasticMeshArgs(
    steps=6, batch_size=24, size="tiny", layers=4, clip=0.1, json=True, patience=5.0, checkpoint_every=2
)


def train(cluster: Cluster, args: ElasticMeshArgs, victim: str = "") -> None:
    torch.set_default_dtype(torch.float64)
    if cluster.rank == 1 and victim:
        owner, name, call = {
            "load": (Run, "_load", 0),
            "save": (Run, "save", 1),
            "form": (Survivors, "_form", 1),
        }[victim]
        die_in(owner, name, call)
    train_elastic_mesh.main(cluster, args)


def die_in(owner: type, name: str, call: int) -> None:
    """Let this rank die after the call of a method with this number, counted from 0."""
    original, calls = getattr(owner, name), iter(range(1 << 30))

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replaced)


def end_of(cluster: Cluster, args: ElasticMeshArgs) -> dict[str, Tensor]:
    """Return all parameters and both moments of each from the checkpoint of the last step."""
    torch.set_default_dtype(torch.float64)
    hybrid = Run(cluster, args, "hybrid_elastic_mesh").hybrid()
    saved, pieces = BackgroundCheckpoints(str(args.checkpoint), cluster), pieces_of(hybrid)
    step = saved.latest()
    assert step == args.steps
    saved.load(step, pieces)
    return {piece.part.name: piece.tensor.detach().clone() for piece in pieces}


@functools.cache
def undisturbed(folder: Path) -> dict[str, Tensor]:
    args = dataclasses.replace(ARGS, checkpoint=str(folder / "undisturbed"))
    run_ranks(train, 1, args, timeout=60)
    return run_ranks(end_of, 1, args)[0]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict[str, Tensor]:
    return undisturbed(tmp_path_factory.mktemp("one"))


def survivors_end_as_one_process(
    one_process: dict[str, Tensor], folder: Path, dead: set[int], victim: str = "", **changes: Any
) -> None:
    args = dataclasses.replace(ARGS, checkpoint=str(folder / "run"), **changes)
    results = run_ranks(train, 4, args, victim, collect_failures=True, timeout=100)
    for rank, result in enumerate(results):
        if rank in dead:
            assert "killed by SIGKILL" in str(result), result
        else:
            assert not isinstance(result, RankError), result
    alone = dataclasses.replace(ARGS, checkpoint=args.checkpoint)
    assert_same(run_ranks(end_of, 1, alone)[0], one_process, what="parameter or moment")


@pytest.mark.parametrize(
    "sizes",
    [
        {"zero": 1},
        {"zero": 3},
        {"pipeline": 2, "microbatches": 2},
        {"pipeline": 2, "tensor": 2, "microbatches": 2},
        {"tensor": 2, "zero": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_a_death_on_any_mesh_leaves_the_state_of_one_process(one_process, tmp_path, sizes: dict[str, Any]):
    survivors_end_as_one_process(one_process, tmp_path, {2}, kill=("2@3",), **sizes)


def test_rank_0_and_then_another_one_may_die(one_process, tmp_path):
    survivors_end_as_one_process(one_process, tmp_path, {0, 3}, kill=("0@3", "3@5"), zero=1)


@pytest.mark.parametrize("moment", ["form", "load", "save"])
def test_a_rank_may_die_while_it_meets_the_others_loads_or_saves(one_process, tmp_path, moment: str):
    kill = () if moment == "save" else ("0@3",)
    survivors_end_as_one_process(one_process, tmp_path, {1, *([0] if kill else [])}, moment, kill=kill)


def test_without_a_checkpoint_the_survivors_train_from_the_beginning(tmp_path):
    args = dataclasses.replace(ARGS, kill=("1@2",), steps=3)
    results = run_ranks(train, 2, args, collect_failures=True, timeout=60)
    assert not isinstance(results[0], RankError), results[0]


def test_the_mesh_of_the_survivors_holds_no_more_on_a_rank_than_before_and_keeps_what_it_can():
    def after(ranks: int, **sizes: Any) -> tuple[int, int, int]:
        found = sizes_for(ranks, dataclasses.replace(ARGS, layers=8), ParallelSizes(**sizes))
        return found.pipeline, found.data, found.tensor

    assert after(3, data=4) == (1, 3, 1)
    assert after(3, pipeline=2, data=2) == (3, 1, 1)
    assert after(6, pipeline=2, data=2, tensor=2) == (3, 1, 2)
    assert after(7, pipeline=2, data=2, tensor=2) == (7, 1, 1)
    assert after(3, data=2, tensor=2, zero=3) == (1, 3, 1)
    assert after(1, pipeline=2) == (1, 1, 1)


def test_survivors_that_cannot_divide_the_model_say_so():
    with pytest.raises(WorkbookError, match="5 ranks are left, and cannot train this model: 24 examples in"):
        sizes_for(5, ARGS, ParallelSizes(data=6, zero=3))
