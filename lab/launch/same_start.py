"""Refuse ranks that were started with different arguments or data, because they would train wrongly.

      rank 0    data 3f0c..  --seed 0 ─┐             ┌─► compares all: "--seed is 0 on rank 0, 2
      rank 1    data 3f0c..  --seed 1 ─┼─►  store  ──┼─►  and 1 on rank 1: start all ranks with the
      rank 2    data 3f0c..  --seed 0 ─┘             └─►  same arguments"

The arguments and a digest of the training data travel together, through the store.
"""

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError

_NAP = 0.002  # seconds between two checks of the store


def check_same_start(
    cluster: Cluster, data: Tensor, arguments: Mapping[str, Any], timeout: float | None = None
) -> None:
    """Return if all ranks have the same data and arguments. Otherwise raise the same WorkbookError on all."""
    store = cluster.store
    prefix = f"lab.same_start/{store.add(f'lab.same_start/calls/{cluster.rank}', 1)}"
    values = {name: "unset" if value is None else str(value) for name, value in arguments.items()}
    report = {"digest": data_digest(data), "python": platform.python_version(), "arguments": values}
    store.set(f"{prefix}/{cluster.rank}", json.dumps(report))
    # torch's stubs do not know that a store has a timeout
    seconds = store.timeout.total_seconds() if timeout is None else timeout  # type: ignore[attr-defined]
    keys = [f"{prefix}/{rank}" for rank in range(cluster.world_size)]
    _wait_for(store, keys, seconds)
    verdict = _compare([json.loads(store.get(key)) for key in keys])
    if verdict:
        raise WorkbookError(verdict)


def data_digest(data: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _compare(reports: list[dict[str, Any]]) -> str:
    odd = [str(rank) for rank, report in enumerate(reports) if report["digest"] != reports[0]["digest"]]
    if odd:
        pythons = [f"{report['python']} on rank {rank}" for rank, report in enumerate(reports)]
        return (
            f"the training data of rank {', '.join(odd)} differs from rank 0's; the text is the source of "
            f"Python itself ({', '.join(pythons)}): start all ranks with the same checkout and Python"
        )
    clauses, arguments = [], [report["arguments"] for report in reports]
    for name in arguments[0]:
        if not all(name in one for one in arguments):
            continue  # an argument of another script: then the script's name differs too
        ranks_of: dict[str, list[str]] = {}
        for rank, one in enumerate(arguments):
            ranks_of.setdefault(one[name], []).append(str(rank))
        if len(ranks_of) > 1:
            values = [f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_of.items()]
            clauses.append(f"{name} is {' and '.join(values)}")
    return f"{'; '.join(clauses)}: start all ranks with the same arguments" if clauses else ""


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Return when all keys are there. Raise WorkbookError that names ranks whose keys are missing."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):  # not wait(): it prints C++ stack frames, and names no missing key
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise WorkbookError(
                f"rank {', '.join(missing)} sent no digest of its data within {seconds:g} s: "
                "look for its error, or whether it is stuck or paused"
            )
        time.sleep(_NAP)
