"""Choose the number of threads of a rank: its share of the machine's cores.

By default every rank starts as many threads as the machine has cores. Then two ranks on two cores run four
threads that wait for each other, and a step takes two to three times as long.
"""

import hashlib
import os
import socket
from pathlib import Path

import torch

# MKL chooses the code of each of these functions at its first call. If several threads make that call at the
# same time, one of them may get code of low accuracy (github.com/pytorch/pytorch/issues/188792). Then the
# first step of AdamW ends with different parameters on one rank.
_VECTOR_MATH = (
    *("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "erfinv", "trunc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
)


def own_cores() -> frozenset[int]:
    """Return the ids of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


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
        share = len(own_cores()) // num_ranks
        torch.set_num_threads(max(1, min(share, torch.get_num_threads())))


def choose_vector_math() -> None:
    """Let MKL choose the code of its vector functions now, in one thread, instead of in the first step."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)  # too small for more than one thread
        for name in _VECTOR_MATH:
            getattr(torch, name)(number)
