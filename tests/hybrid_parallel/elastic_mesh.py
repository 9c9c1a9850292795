"""Let ranks of an elastic training on a mesh die, and compare the end with that of an undisturbed process."""

import dataclasses
import functools
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comm.membership.survivors import Survivors
from hybrid_parallel.elastic import train_elastic_mesh
from hybrid_parallel.elastic.train_elastic_mesh import ElasticMeshArgs
from hybrid_parallel.train_hybrid import begin
from lab.check import assert_same
from lab.cluster import Cluster
from lab.ranks import RankError, run_ranks
from training.checkpoint import Checkpoints, complete_steps
from training.resuming import Resuming
from training.state_shards import tensors_and_numbers

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
    _, hybrid = begin(cluster, dataclasses.replace(args, checkpoint=None), "hybrid_elastic_mesh")
    assert complete_steps(Path(str(args.checkpoint)))[-1] == args.steps
    checkpoints = Checkpoints(str(args.checkpoint), cluster)
    shards = hybrid.shards(hybrid.optimizer)
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
