"""Checkpoints of replicas: rank 0 writes one for all, and reads it for all.

Replicas are equal, so one file is enough; and ranks need not share a file system, so on the way back the
bytes travel over the group (comm.collectives.broadcast).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from comm.collectives import broadcast
from lab import checkpoint
from lab.cluster import Cluster
from lab.together import on_main


def save(cluster: Cluster, directory: str, state: dict[str, Any]) -> None:
    """Have rank 0 write `state`; returns when it is on disk. WorkbookError on every rank if that failed."""

    def write() -> None:
        checkpoint.save(Path(directory), state)

    on_main(cluster, f"save a checkpoint in {directory}", write)


def load(cluster: Cluster, directory: str) -> dict[str, Any]:
    """Return what rank 0 finds in `directory`, on every rank.

    WorkbookError on all if there is none, or it is damaged.
    """
    data, name = b"", str(Path(directory) / checkpoint.NAME)

    def look() -> int:
        nonlocal data
        data = checkpoint.read(Path(directory))
        checkpoint.unpack(data, name)
        return len(data)

    size = on_main(cluster, f"load {name}", look)
    message = torch.empty(size, dtype=torch.uint8, device=cluster.device)
    if cluster.is_main:
        message.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    broadcast(message)
    return checkpoint.unpack(message.cpu().numpy().tobytes(), name)
