"""Ranks that were started differently are refused before the first step: they would train, and wrongly.

      rank 0    data 3f0c..  --seed 0 ─┐                             ┌─► "--seed is 0 on rank 0, 2 and 1 on
      rank 1    data 3f0c..  --seed 1 ─┼─► store ─► rank 0 compares ─┼─►  rank 1: start all ranks with the
      rank 2    data 3f0c..  --seed 0 ─┘                             └─►  same arguments"

The arguments and a digest of the training data travel together, in one exchange.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lab.cluster import Cluster
from lab.errors import WorkbookError


def check_same_start(
    cluster: Cluster, data: Tensor, arguments: Mapping[str, Any], timeout: float = 60.0
) -> None:
    """Return when all ranks hold the same data and arguments; else raise one WorkbookError on every rank.

    Rank 0 compares the reports and publishes its verdict on `cluster.store`. It waits `timeout` seconds
    for the others to report, and they twice as long for the verdict.
    """
    call = cluster.store.add(f"lab.same_start/calls/{cluster.rank}", 1)
    store = dist.PrefixStore(f"lab.same_start/{call}", cluster.store)
    values = {name: "unset" if value is None else str(value) for name, value in arguments.items()}
    report = {"digest": digest(data), "python": platform.python_version(), "arguments": values}
    store.set(f"report/{cluster.rank}", json.dumps(report))
    if cluster.is_main:
        verdict = _compare(store, cluster.world_size, timeout)
        store.set("verdict", verdict)
        if verdict:
            # The store may live in this process: let the others read why before it ends.
            _arrived(store, [f"read/{rank}" for rank in range(1, cluster.world_size)], min(timeout, 5.0))
    elif _arrived(store, ["verdict"], 2 * timeout):
        verdict = store.get("verdict").decode()
        store.set(f"read/{cluster.rank}", "")
    else:
        verdict = (
            f"rank 0 has not compared the ranks' data (waited up to {2 * timeout:g} s): look for its error"
        )
    if verdict:
        raise WorkbookError(verdict)


def digest(data: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _compare(store: dist.Store, world_size: int, timeout: float) -> str:
    """Return what is wrong with the reports of all ranks, in a sentence; empty if nothing is."""
    keys = [f"report/{rank}" for rank in range(world_size)]
    if not _arrived(store, keys, timeout):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"rank {', '.join(missing)} sent no digest of its data within {timeout:g} s: look for its error"
        )
    reports = [json.loads(store.get(key)) for key in keys]
    odd = [str(rank) for rank, report in enumerate(reports) if report["digest"] != reports[0]["digest"]]
    if odd:
        pythons = [f"{report['python']} on rank {rank}" for rank, report in enumerate(reports)]
        return (
            f"the training data of rank {', '.join(odd)} is not rank 0's; text is the source of each rank's "
            f"own Python ({', '.join(pythons)}): start all ranks with the same checkout and build of Python"
        )
    differing = _differing([report["arguments"] for report in reports])
    return f"{'; '.join(differing)}: start all ranks with the same arguments" if differing else ""


def _differing(arguments: list[dict[str, str]]) -> list[str]:
    """Return a clause for each argument that differs: its values, and the ranks that have them."""
    clauses = []
    for name in arguments[0]:
        if not all(name in one for one in arguments):
            continue  # another script's: then the name of the script differs, too
        ranks_of: dict[str, list[str]] = {}
        for rank, one in enumerate(arguments):
            ranks_of.setdefault(one[name], []).append(str(rank))
        if len(ranks_of) > 1:
            values = [f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_of.items()]
            clauses.append(f"{name} is {' and '.join(values)}")
    return clauses


def _arrived(store: dist.Store, keys: list[str], timeout: float) -> bool:
    """Wait for all keys; False if time runs out or the store is gone."""
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        return False
    return True
