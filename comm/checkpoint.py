"""Checkpoints of replicas: rank 0 writes one for all, and reads it for all.

Replicas are equal, so one file is enough; and ranks need not share a file system, so on the way back the
bytes travel over the group (comm.collectives.broadcast).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from comm.collectives import broadcast
from comm.refuse import tell
from lab import checkpoint
from lab.cluster import Cluster
from lab.errors import WorkbookError


def save(cluster: Cluster, directory: str, state: dict[str, Any]) -> None:
    """Have rank 0 write `state`; returns when it is on disk. WorkbookError on every rank if that failed."""
    failure = ""
    if cluster.is_main:
        try:
            checkpoint.save(Path(directory), state)
        except WorkbookError as error:
            failure = str(error)
    tell(cluster, "save", failure)


def load(cluster: Cluster, directory: str) -> dict[str, Any]:
    """What rank 0 finds in `directory`, on every rank. WorkbookError on all if it finds nothing whole."""
    data, failure = b"", ""
    if cluster.is_main:
        try:
            data = checkpoint.read(Path(directory))
            checkpoint.unpack(data, directory)
        except WorkbookError as error:
            failure = str(error)
    tell(cluster, "load", failure)
    size = torch.tensor([len(data)], device=cluster.device)
    broadcast(size)
    message = torch.empty(int(size), dtype=torch.uint8, device=cluster.device)
    if cluster.is_main:
        message.copy_(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))
    broadcast(message)
    return checkpoint.unpack(message.cpu().numpy().tobytes(), directory)
