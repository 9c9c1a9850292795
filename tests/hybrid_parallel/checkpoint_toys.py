"""Pieces of toy tensors on toy meshes, and checkpoints of them."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_parallel import checkpoint_folder as files
from hybrid_parallel.checkpoint import BackgroundCheckpoints
from hybrid_parallel.checkpoint_pieces import Piece
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError

SHAPES = {"model/weight": (6, 8), "model/bias": (5,), "optimizer/step": ()}
CUT = {"model/weight": 1, "model/bias": 0}  # by which dimension tensor parallelism cuts


def full(name: str, value: float) -> Tensor:
    """Return a full tensor in which every element differs; it depends on the name and on `value`."""
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + value + 1000 * len(name)


def pieces_of(rank: int, world_size: int, value: float, tensor: int = 1) -> list[Piece]:
    """Return what a rank has: boxes of `tensor` parallel ranks, cut among the others into flat ranges."""
    column, row = rank % tensor, rank // tensor
    rows = world_size // tensor
    pieces = []
    for name, shape in SHAPES.items():
        whole = full(name, value)
        if name not in CUT:
            pieces.append(Piece(name, whole, shape, is_replica=rank > 0))
            continue
        box = [(0, size) for size in shape]
        dim, size = CUT[name], shape[CUT[name]]
        box[dim] = (column * size // tensor, (column + 1) * size // tensor)
        boxed = whole.narrow(dim, box[dim][0], box[dim][1] - box[dim][0]).reshape(-1)
        start, end = (place * len(boxed) // rows for place in (row, row + 1))
        pieces.append(Piece(name, boxed[start:end], shape, tuple(box), start))
    return pieces


def save(cluster: Cluster, folder: Path, *values: int, tensor: int = 1, keep: int = 3) -> None:
    """Save the toy tensors of each value as a step of that number."""
    checkpoints = BackgroundCheckpoints(folder, cluster, keep)
    if (latest := checkpoints.latest()) is not None:
        load_step(checkpoints, cluster, latest, tensor)
    for value in values:
        pieces = pieces_of(cluster.rank, cluster.world_size, value, tensor)
        checkpoints.save(value, pieces, {"step": value, "rank": cluster.rank})
    checkpoints.wait()


def load(cluster: Cluster, folder: Path, tensor: int = 1) -> int:
    """Return the step of the newest checkpoint, after all of it was found to be that step's."""
    checkpoints = BackgroundCheckpoints(folder, cluster)
    latest = checkpoints.latest()
    assert latest is not None
    load_step(checkpoints, cluster, latest, tensor)
    return latest


def load_step(checkpoints: BackgroundCheckpoints, cluster: Cluster, step: int, tensor: int = 1) -> None:
    """Load a step, and compare each piece and each rank's own values with what was saved."""
    wanted = pieces_of(cluster.rank, cluster.world_size, -1, tensor)
    extras = checkpoints.load(step, wanted)
    assert extras == [{"step": step, "rank": rank} for rank in range(len(extras))]
    expected = pieces_of(cluster.rank, cluster.world_size, step, tensor)
    for got, right in zip(wanted, expected, strict=True):
        assert torch.equal(got.tensor, right.tensor), got.name


def written(directory: Path, ranks: Iterable[list[Piece]]) -> files.Manifest:
    """Save the pieces of several ranks as step 0, without processes, and return the manifest."""
    words = []
    for rank, pieces in enumerate(ranks):
        tensors = {piece.part: _flat(piece.tensor) for piece in pieces if not piece.is_replica}
        files.write_rank(directory, 0, rank, "0", tensors)
        parts = [files.as_json(saved) for saved in files.describe(rank, tensors)]
        words.append({"parts": parts, "extra": {}, "tied": {}})
    files.publish(directory, files.manifest_of(0, "0", words))
    return files.read_manifest(directory, 0)


def refusal(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the sentence with which an action refuses."""
    with pytest.raises(WorkbookError) as caught:
        action(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _flat(tensor: Tensor) -> Tensor:
    """Return a dense flat copy. `contiguous` would leave the stride of an empty tensor as it is."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
