"""Which GPU a rank computes on, and which backend speaks for it.

A launcher shows each rank all GPUs of its machine (torchrun), or its own alone (Slurm's --gpus-per-task=1),
whose number is 0 then. So LOCAL_RANK does not tell whether there are enough; two ranks with one GPU do.
"""

import os
from collections.abc import Mapping

import torch

from comm.errors import CommError
from lab.devices import device_of, num_gpus


def choose_device(local_rank: int) -> tuple[torch.device, str]:
    """Return this rank's device and backend: its GPU and nccl where there are GPUs, else the CPU and gloo."""
    gpus = num_gpus()
    backend = os.environ.get("BACKEND") or ("nccl" if gpus else "gloo")
    if backend not in ("gloo", "nccl"):
        raise CommError(f"BACKEND is {backend!r}; it must be gloo or nccl.")
    if not gpus:
        if backend == "nccl":
            raise CommError("BACKEND is nccl, but there is no GPU here; leave it out or choose gloo.")
        return torch.device("cpu"), backend
    device = device_of(local_rank)
    torch.cuda.set_device(device)
    return device, backend


def name_of(device: torch.device, backend: str) -> str:
    """Return the name that no other GPU has, in whatever machine; empty where ranks may share the device."""
    return str(torch.cuda.get_device_properties(device).uuid) if backend == "nccl" else ""


def refusal_of(names: Mapping[int, str]) -> str:
    """Return the sentence that refuses one GPU of two ranks; `names` has each rank's `name_of`."""
    first: dict[str, int] = {}
    for rank, name in sorted(names.items()):
        if name and first.setdefault(name, rank) != rank:
            return (
                f"Ranks {first[name]} and {rank} have one GPU ({name}), and nccl wants one for each rank; "
                "start fewer ranks there, give each its own LOCAL_RANK, or let them share with BACKEND=gloo."
            )
    return ""
