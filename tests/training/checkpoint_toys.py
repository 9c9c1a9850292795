"""Shards of toy tensors in toy layouts, and checkpoints of them."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.cluster import Cluster
from training.checkpoint import Checkpoints, complete_steps
from training.state_shards import StateShard


class Evil:
    """Runs code when it is unpickled; a checkpoint must never do that."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


SHAPES = {"model/weight": (6, 12), "model/bias": (5,), "model/filter": (3, 2, 4), "optimizer/step/bias": ()}
CUT = {"model/weight": 1, "model/bias": 0}  # by which dimension tensor parallelism cuts


def full(name: str, value: float) -> Tensor:
    """Return a full tensor in which every element differs; it depends on the name and on `value`."""
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + value + 1000 * len(name)


def shards_of_rank(rank: int, world_size: int, value: float, tensor: int = 1) -> list[StateShard]:
    """Return what a rank has: boxes of `tensor` parallel ranks, cut among the others into flat ranges.

    With `tensor` = 0 every rank has all in full, the filter with permuted strides.
    """
    if tensor == 0:
        permuted = full("model/filter", value).permute(2, 0, 1).contiguous().permute(1, 2, 0)
        own = {name: full(name, value) for name in SHAPES} | {"model/filter": permuted}
        return [StateShard(name, one) for name, one in own.items()]
    column, row = rank % tensor, rank // tensor
    rows = world_size // tensor
    shards = []
    for name, shape in SHAPES.items():
        whole, box, offset = full(name, value), list(shape), [0] * len(shape)
        if name in CUT:
            dim = CUT[name]
            each = -(-shape[dim] // tensor)  # of the bias the last rank has less
            offset[dim], box[dim] = column * each, each
            whole = whole.split(each, dim)[column] if offset[dim] < shape[dim] else whole.narrow(dim, 0, 0)
        if not shape:
            shards.append(StateShard(name, whole))
            continue
        flat = torch.cat([whole.reshape(-1), torch.full((math.prod(box) - whole.numel(),), -7.0)])
        start, end = (place * len(flat) // rows for place in (row, row + 1))
        shards.append(StateShard(name, flat[start:end], shape, offset, box, start))
    return shards


def save_once(cluster: Cluster, folder: Path, shards: list[StateShard]) -> Checkpoints:
    """Save the shards as step 1."""
    checkpoints = Checkpoints(folder, cluster)
    checkpoints.save(1, shards)
    checkpoints.wait()
    return checkpoints


def save(cluster: Cluster, folder: Path, *values: int, tensor: int = 1, keep: int = 3) -> None:
    """Save the toy tensors of each value as a step of that number."""
    checkpoints = Checkpoints(folder, cluster, keep)
    for value in values:
        shards = shards_of_rank(cluster.rank, cluster.world_size, value, tensor)
        checkpoints.save(value, shards, {"value": value})
    checkpoints.wait()


def load(cluster: Cluster, folder: Path, tensor: int = 1) -> int:
    """Return the value of the newest checkpoint, after all of it was found to be of that value."""
    return load_step(Checkpoints(folder, cluster), cluster, complete_steps(folder)[-1], tensor)


def load_step(checkpoints: Checkpoints, cluster: Cluster, step: int, tensor: int = 1) -> int:
    """Load a step, compare each shard with what was saved, and return the value of them."""
    wanted = shards_of_rank(cluster.rank, cluster.world_size, -1, tensor)
    checkpoints.load(step, wanted)
    value = checkpoints.find(step).extra["value"]
    expected = shards_of_rank(cluster.rank, cluster.world_size, value, tensor)
    for got, right in zip(wanted, expected, strict=True):
        assert torch.equal(got.tensor, right.tensor), got.name
    return value
