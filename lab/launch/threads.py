"""Choose the number of threads of a rank: its share of the machine's cores.

By default every rank starts as many threads as the machine has cores. Then two ranks on two cores run four
threads that wait for each other, and a step takes two to three times as long.
"""

import hashlib
import math
import os
import socket
from contextlib import suppress
from pathlib import Path

import torch

# MKL chooses the code of each of these functions at its first call. If several threads make that call at the
# same time, one of them may get code of low accuracy (github.com/pytorch/pytorch/issues/188792). Then the
# first step of AdamW ends with different parameters on one rank.
_VECTOR_MATH = (
    *("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "erfinv", "trunc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
)


CGROUP = Path("/sys/fs/cgroup")  # where a container finds its own limits


def own_cores() -> frozenset[int]:
    """Return the ids of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_limit() -> float:
    """Return how many cores this process's container may use at a time (docker run --cpus), or infinity."""
    quota, period = "max", "1"
    with suppress(OSError, ValueError):
        if (limit := CGROUP / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:  # cgroup version 1
            quota, period = ((CGROUP / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return float(quota) / float(period) if quota.strip().isdecimal() else math.inf


def machine_id() -> str:
    """Return a name that is equal for all processes and containers of one booted machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def cores_id() -> str:
    """Return a text that is equal in all processes that use the same cores of the same machine."""
    return hashlib.sha256(f"{machine_id()} {sorted(own_cores())}".encode()).hexdigest()[:16]


def share_cores(num_ranks: int) -> None:
    """Set the number of threads to this rank's share of its cores, unless OMP_NUM_THREADS is set."""
    if not os.environ.get("OMP_NUM_THREADS"):
        share = int(min(len(own_cores()), core_limit())) // num_ranks
        torch.set_num_threads(max(1, min(share, torch.get_num_threads())))


def choose_vector_math() -> None:
    """Let MKL choose the code of its vector functions now, in one thread, instead of in the first step."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)  # too small for more than one thread
        for name in _VECTOR_MATH:
            getattr(torch, name)(number)
