"""Refuse ranks that were started with different arguments or data, because they would train wrongly.

      rank 0    data 3f0c..  --seed 0 ─┐                ┌─► compares all: "--seed is 0 on rank 0, 2
      rank 1    data 3f0c..  --seed 1 ─┼─►  exchange  ──┼─►  and 1 on rank 1: start all ranks with the
      rank 2    data 3f0c..  --seed 0 ─┘                └─►  same arguments"

The arguments and a digest of the training data travel together.
"""

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comm.exchange import exchange
from lab.launch.errors import WorkbookError


class DifferentStart(WorkbookError):
    """Say how ranks were started differently. Every rank prints it: a user may see the output of one only."""

    concerns_all = True


def check_same_start(data: Tensor, arguments: Mapping[str, Any]) -> None:
    """Return if all ranks have the same data and arguments. Else raise the same DifferentStart on all."""
    values = {name: "unset" if value is None else str(value) for name, value in arguments.items()}
    reports = exchange((data_digest(data), platform.python_version(), values))
    digests, versions, everyones = zip(*reports, strict=True)
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        pythons = ", ".join(f"{version} on rank {rank}" for rank, version in enumerate(versions))
        raise DifferentStart(
            f"the training data of rank {', '.join(odd)} differs from rank 0's; the text is the source of "
            f"Python itself ({pythons}): start all ranks with the same checkout and Python"
        )
    clauses = []
    for name in everyones[0]:
        if not all(name in one for one in everyones):
            continue  # an argument of another script: then the script's name differs too
        ranks_of: dict[str, list[str]] = {}
        for rank, one in enumerate(everyones):
            ranks_of.setdefault(one[name], []).append(str(rank))
        if len(ranks_of) > 1:
            shown = " and ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_of.items())
            clauses.append(f"{name} is {shown}")
    if clauses:
        raise DifferentStart(f"{'; '.join(clauses)}: start all ranks with the same arguments")


def data_digest(data: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
