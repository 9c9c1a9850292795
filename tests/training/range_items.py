"""Tensors in uneven ranges, saved and loaded, and what a rank says when it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranges import Items, Range
from training import range_checkpoint

NUMEL = 11


def items(cluster: Cluster, value: float) -> Items:
    """Return a tensor in uneven ranges (rank 0 has none if there are others), and one that all have."""
    others = cluster.world_size - 1
    start, end = (NUMEL * max(0, r) // others if others else NUMEL for r in (cluster.rank - 1, cluster.rank))
    start = start if others else 0
    part = value + torch.arange(start, end, dtype=torch.float32)
    return {"cut": Range(part, start, NUMEL), "whole": torch.full((2, 2), value)}


def save(cluster: Cluster, directory: Path, value: float) -> None:
    range_checkpoint.save(cluster, directory, items(cluster, value), {"value": value})


def load(cluster: Cluster, directory: Path) -> float:
    """Return the value with which all of the checkpoint was saved."""
    found = range_checkpoint.find(cluster, directory, lambda found: None)
    loaded = items(cluster, -100.0)
    range_checkpoint.read(found, loaded)
    for item, expected in zip(loaded.values(), items(cluster, found.header["value"]).values(), strict=True):
        assert torch.equal(tensor_of(item), tensor_of(expected))
    return found.header["value"]


def tensor_of(item: Range | Tensor) -> Tensor:
    return item.tensor if isinstance(item, Range) else item


def refusal(action: Callable[..., Any], *args: Any) -> str:
    """Return the sentence with which a rank refuses."""
    with pytest.raises(WorkbookError) as caught:
        action(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def the_one(texts: list[str]) -> str:
    [text] = set(texts)
    return text
