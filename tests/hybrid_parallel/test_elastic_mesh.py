"""Survivors of a death on a mesh end where an undisturbed process ends. tests/end_to_end has more meshes."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.membership.survivors import Survivors
from hybrid_parallel.elastic import train_elastic_mesh
from hybrid_parallel.elastic.train_elastic_mesh import ElasticMeshArgs, sizes_for
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.train_hybrid import begin
from lab.check import assert_same
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import RankError, run_ranks
from tests.hybrid_parallel.test_elastic import and_then, at_step, die
from tests.on_ranks import on_ranks
from training.checkpoint import Checkpoints, complete_steps
from training.resuming import Resuming
from training.state_shards import tensors_and_numbers


def test_a_death_beside_zero_3_leaves_the_state_of_one_process(tmp_path):
    survivors_end_as_one_process(tmp_path, {2}, kill=("2@3",), zero=3)


def test_without_a_checkpoint_the_survivors_train_from_the_beginning(tmp_path):
    args = dataclasses.replace(ARGS, kill=("1@2",), steps=3)
    results = run_ranks(train, 2, args, collect_failures=True, timeout=60)
    assert not isinstance(results[0], RankError), results[0]


@on_ranks(2, timeout=60)
def test_a_timeout_while_the_groups_of_a_mesh_form_leads_to_another_group_of_all(cluster: Cluster):
    def times_out(original: Any) -> Any:
        def fail(*args: Any, **options: Any) -> None:
            raise RuntimeError("Wait timeout")  # as gloo says it

        return fail

    if cluster.rank == 1:
        at_step(0, dist, "new_subgroups_by_enumeration", times_out)
    train_elastic_mesh.main(cluster, dataclasses.replace(ARGS, steps=2, zero=1))


def test_the_mesh_of_the_survivors_holds_no_more_on_a_rank_than_before_and_keeps_what_it_can():
    def after(ranks: int, **sizes: Any) -> tuple[int, int, int]:
        found = sizes_for(ranks, dataclasses.replace(ARGS, layers=8), ParallelSizes(**sizes))
        assert (found.context, found.expert_ranks) == (1, 1)
        return found.pipeline, found.data, found.tensor

    assert after(3, data=4) == (1, 3, 1)
    assert after(3, pipeline=2, data=2) == (3, 1, 1)
    assert after(6, pipeline=2, data=2, tensor=2) == (3, 1, 2)
    assert after(7, pipeline=2, data=2, tensor=2) == (7, 1, 1)
    assert after(3, data=2, tensor=2, zero=3) == (1, 3, 1)
    assert after(1, pipeline=2) == (1, 1, 1)


def test_the_mesh_of_the_survivors_keeps_cut_sequences_and_divided_experts_where_it_can():
    def after(ranks: int, **sizes: Any) -> tuple[int, int, int]:
        found = sizes_for(ranks, dataclasses.replace(ARGS, experts=12), ParallelSizes(**sizes))
        return found.data, found.context, found.expert_ranks

    assert after(6, data=4, context=2, expert_ranks=6) == (3, 2, 6)
    assert after(3, data=2, context=2, expert_ranks=2) == (3, 1, 3)  # a sequence is not cut for 3/2 ranks
    assert after(4, data=6, context=1, expert_ranks=3) == (4, 1, 4)
    assert after(4, data=3, context=2) == (2, 2, 1)


def test_survivors_that_cannot_divide_the_model_say_so():
    with pytest.raises(WorkbookError, match="5 ranks are left, and cannot train this model: 24 examples in"):
        sizes_for(5, ARGS, ParallelSizes(data=6, zero=3))


ARGS = ElasticMeshArgs(
    steps=6, batch_size=24, size="tiny", layers=4, clip=0.1, json=True, patience=5.0, checkpoint_every=2
)


def train(cluster: Cluster, args: ElasticMeshArgs, victim: str = "") -> None:
    torch.set_default_dtype(torch.float64)
    if cluster.rank == 1 and victim:
        owner, name, call = {
            "load": (Resuming, "_load", 0),
            "save": (Checkpoints, "save", 1),
            "form": (Survivors, "_form", 1),
        }[victim]
        at_step(call, owner, name, and_then(die))
    train_elastic_mesh.main(cluster, args)


def end_of(cluster: Cluster, args: ElasticMeshArgs) -> dict[str, Tensor]:
    """Return all parameters and both moments of each from the checkpoint of the last step."""
    torch.set_default_dtype(torch.float64)
    _, hybrid = begin(cluster, dataclasses.replace(args, checkpoint=None), "hybrid_elastic_mesh")
    assert complete_steps(Path(str(args.checkpoint)))[-1] == args.steps
    checkpoints = Checkpoints(str(args.checkpoint), cluster)
    shards = hybrid.state_shards(hybrid.optimizer)
    checkpoints.load(args.steps, shards)
    tensors, _ = tensors_and_numbers(shards)
    return {shard.name: shard.tensor.detach().clone() for shard in tensors}


@functools.cache
def undisturbed(experts: int) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        args = dataclasses.replace(ARGS, checkpoint=folder, experts=experts)
        run_ranks(train, 1, args, timeout=60)
        return run_ranks(end_of, 1, args)[0]


def survivors_end_as_one_process(folder: Path, dead: set[int], victim: str = "", **changes: Any) -> None:
    args = dataclasses.replace(ARGS, checkpoint=str(folder / "run"), **changes)
    results = run_ranks(train, 4, args, victim, collect_failures=True, timeout=100)
    for rank, result in enumerate(results):
        if rank in dead:
            assert "killed by SIGKILL" in str(result), result
        else:
            assert not isinstance(result, RankError), result
    alone = dataclasses.replace(ARGS, checkpoint=args.checkpoint, experts=args.experts)
    assert_same(run_ranks(end_of, 1, alone)[0], undisturbed(args.experts), what="parameter or moment")
