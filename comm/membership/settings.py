"""Read and validate the environment variables of a rendezvous."""

import math
import os
import re
import socket
import sys
from contextlib import suppress
from typing import Any

import torch

from comm.errors import CommError
from lab.launch.devices import device_of, num_gpus
from lab.units import MAX_SECONDS


def rank_and_world_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE, or 0 and 1 if both are unset: a single process."""
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    if rank is None and world_size is None:
        _refuse_a_launcher_without_rank()
        return 0, 1
    if rank is None or world_size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise CommError(f"{missing} is not set; start the script with torchrun, make run or docker-compose.")
    if not 0 <= rank < world_size:
        raise CommError(
            f"RANK is {rank}, but with WORLD_SIZE {world_size} it must be in 0..{world_size - 1}."
        )
    return rank, world_size


# The variables in which launchers say how many processes they have started, and which one this is.
_LAUNCHERS = {
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}


def _refuse_a_launcher_without_rank() -> None:
    """Raise CommError if srun or mpirun has started several processes, which would all train alone."""
    for size, rank in _LAUNCHERS.items():
        if rank in os.environ and (number(size) or 1) > 1:
            raise CommError(
                f"{size} is {number(size)}, but RANK is not set, so each process would train alone; set "
                f"RANK=${rank}, WORLD_SIZE=${size} and MASTER_ADDR in each process, or RANK=0 and "
                "WORLD_SIZE=1 for a training of one process."
            )


def number(name: str) -> int | None:
    """Return the number in an environment variable, or None if it is unset or empty."""
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and len(text) < 10):
        raise CommError(f"{name} is {text!r}; it must be a non-negative integer.")
    return int(text) if text else None


def seconds(name: str, default: float) -> float:
    """Return the seconds in an environment variable, or `default`: at least 1 ms, as torch counts in ms."""
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SECONDS:
        raise CommError(
            f"{name} is {text!r}; it must be a number of seconds above 0 and at most {MAX_SECONDS}."
        )
    return max(value, 1e-3)


def master() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT, the address at which rank 0 opens the store."""
    host, port = os.environ.get("MASTER_ADDR") or "localhost", number("MASTER_PORT")
    if host in ("0.0.0.0", "::"):
        raise CommError(
            f"MASTER_ADDR is {host}, which means every interface; it must be the address of rank 0's machine "
            "in the network of the ranks, or 127.0.0.1 if all run here."
        )
    if port is not None and port > 65535:
        raise CommError(f"MASTER_PORT is {port}; it must be at most 65535.")
    return host, 29500 if port is None else port


def refuse_ipv6(host: str) -> None:
    """Raise CommError if the host has IPv6 addresses only. A name may be unknown yet, and known later."""
    with suppress(OSError):
        families = {family for family, *_ in socket.getaddrinfo(host, None)}
        if families == {socket.AF_INET6}:
            raise CommError(
                f"MASTER_ADDR is {host}, which has an IPv6 address only, but ranks connect over IPv4: "
                "give an IPv4 address of rank 0's machine, or a name that has one."
            )


def check_interface() -> None:
    """Raise CommError if GLOO_SOCKET_IFNAME names an interface that this machine does not have."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in here:
            raise CommError(
                f"GLOO_SOCKET_IFNAME is {name!r}, but this machine has no such network interface; "
                f"choose one of {', '.join(here)}."
            )


def choose_device(local_rank: int) -> tuple[torch.device, str, str]:
    """Return this rank's device and backend: its GPU and nccl if each rank has one, else gloo.

    On gloo ranks may share a GPU, and without any they use the CPU. BACKEND can choose. The third value is
    the GPU's unique name, or "" on gloo.
    """
    gpus, ranks = num_gpus(), number("LOCAL_WORLD_SIZE") or 1
    backend = os.environ.get("BACKEND") or ("nccl" if gpus >= ranks else "gloo")
    if backend not in ("gloo", "nccl"):
        raise CommError(f"BACKEND is {backend!r}; it must be gloo or nccl.")
    if 0 < gpus < ranks and not os.environ.get("BACKEND") and local_rank == 0:
        shared = f"{gpus} GPU{'s' * (gpus > 1)}"
        print(f"{ranks} ranks share {shared} on this machine, so they send with gloo.", file=sys.stderr)
    if not gpus:
        refuse_a_hidden_gpu()
        if backend == "nccl":
            raise CommError(
                "BACKEND is nccl, but this machine has no GPU; leave BACKEND out or set it to gloo."
            )
        return torch.device("cpu"), backend, ""
    device = device_of(local_rank)
    if torch.version.cuda is not None:
        refuse_without_kernels(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
    torch.cuda.set_device(device)
    return device, backend, name_of(device) if backend == "nccl" else ""


def name_of(device: torch.device) -> str:
    """Return a name that no other GPU has: of an AMD GPU, which may have no UUID, its place in a machine."""
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:  # nccl takes ranks with other NCCL_HOSTIDs for those of other machines
        return f"{properties.uuid}{os.environ.get('NCCL_HOSTID', '')}"
    place = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{socket.gethostname()} {':'.join(map(str, place))}"


def refuse_a_hidden_gpu() -> None:
    """Raise CommError if torch is built for CUDA and sees no GPU, though an NVIDIA driver shows one."""
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return
    if os.path.exists("/dev/nvidia0"):
        raise CommError(
            f"There is an NVIDIA GPU, and torch, built for CUDA {torch.version.cuda}, cannot use it: the "
            "driver may be too old. Install a newer one, or an older torch: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu126. Or train on the CPU with CUDA_VISIBLE_DEVICES= in front "
            "of the command."
        )


def refuse_without_kernels(capability: tuple[int, int], architectures: list[str]) -> None:
    """Raise CommError if torch was built without kernels for a GPU of this compute capability.

    `architectures` is torch.cuda.get_arch_list(): "sm_80" runs on 8.0 and later versions of 8, and from
    "compute_80" the driver can make kernels for any later GPU.
    """
    major, minor = capability
    built = [re.fullmatch(r"(sm|compute)_(\d+)(\d)\w?", name) for name in architectures]
    for found in filter(None, built):
        version = int(found[2]), int(found[3])
        if version <= capability and (found[1] == "compute" or version[0] == major):
            return
    if any(built):
        raise CommError(
            f"This torch has no kernels for the GPU here (sm_{major}{minor}), only for "
            f"{', '.join(architectures)}; install one that has: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu126 for an older GPU, cu130 for a newer one. Or train on the "
            "CPU with CUDA_VISIBLE_DEVICES= in front of the command."
        )
