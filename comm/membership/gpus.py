"""Choose the GPU and the backend of a rank, and refuse two ranks on one GPU.

Some launchers show all GPUs of the machine to each rank (torchrun). Others show each rank its own GPU only,
as number 0 (Slurm's --gpus-per-task=1). So LOCAL_RANK does not tell whether there are enough GPUs. The ranks
compare the names of their GPUs instead.
"""

import os
from collections.abc import Mapping

import torch

from comm.errors import CommError
from lab.launch.devices import device_of, num_gpus


def choose_device(local_rank: int) -> tuple[torch.device, str]:
    """Return this rank's device and backend: its GPU and nccl if there are GPUs, else the CPU and gloo.

    BACKEND can choose gloo for a GPU as well.
    """
    gpus = num_gpus()
    backend = os.environ.get("BACKEND") or ("nccl" if gpus else "gloo")
    if backend not in ("gloo", "nccl"):
        raise CommError(f"BACKEND is {backend!r}; it must be gloo or nccl.")
    if not gpus:
        if backend == "nccl":
            raise CommError(
                "BACKEND is nccl, but this machine has no GPU; leave BACKEND out or set it to gloo."
            )
        return torch.device("cpu"), backend
    device = device_of(local_rank)
    torch.cuda.set_device(device)
    return device, backend


def name_of(device: torch.device, backend: str) -> str:
    """Return the GPU's unique name, or an empty one if ranks may share the device (on gloo)."""
    return str(torch.cuda.get_device_properties(device).uuid) if backend == "nccl" else ""


def refusal_of(names: Mapping[int, str]) -> str:
    """Return an error text if two ranks share a GPU, else "". `names` holds each rank's `name_of`."""
    first: dict[str, int] = {}
    for rank, name in sorted(names.items()):
        if name and first.setdefault(name, rank) != rank:
            return (
                f"Ranks {first[name]} and {rank} share one GPU ({name}), and nccl needs one for each rank; "
                "start fewer ranks there, give each its own LOCAL_RANK, or let them share with BACKEND=gloo."
            )
    return ""
