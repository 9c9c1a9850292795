"""Rendezvous: processes that know only an address find each other and become ranks of one group.

      1. store    rank 0 opens a store at MASTER_ADDR:MASTER_PORT; the others retry until they reach it
      2. meet     each rank writes its name into the store, and waits until all names are there
      3. connect  each rank connects to rank 0, which notices when a rank dies and tells the others
      4. group    torch.distributed connects all ranks

The store is a small key-value server (torch's TCPStore). Under torchrun the agent already runs one. If a rank
finds an error, it writes the reason into the store, and all ranks give up with the same sentence.

These environment variables are read; defaults are in parentheses:

    RANK, WORLD_SIZE            the index of this rank, the number of ranks; if both are unset: one process
    MASTER_ADDR, MASTER_PORT    the address of the store (localhost, 29500)
    LOCAL_RANK                  the index of this rank's GPU on its machine (0)
    BACKEND                     gloo or nccl (nccl if there is a GPU)
    JOIN_TIMEOUT, OP_TIMEOUT    seconds to wait for the other ranks (60), and in one operation (60; with nccl
                                600: it counts from the launch, and hosts run ahead of their GPUs)
    OMP_NUM_THREADS             threads of a rank (the machine's cores, divided by its ranks)

The details are in membership/: store.py (1), meeting.py (2), liveness.py (3). survivors.py is for trainings
that go on after a death.
"""

import math
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from comm.membership.meeting import Meeting
from comm.membership.settings import (
    check_interface,
    choose_device,
    master,
    number,
    rank_and_world_size,
    refuse_ipv6,
    seconds,
)
from comm.membership.store import meeting_store, within
from lab.cluster import Cluster
from lab.launch.ending import complete
from lab.launch.gloo_threads import keep_from_preempting
from lab.launch.interface import LOOPBACK, own_interface
from lab.launch.launcher import end_with_launcher, restart_count
from lab.launch.threads import choose_vector_math, share_cores
from lab.launch.torch_log import hide_torch_warnings

OP_SECONDS = {"gloo": 60.0, "nccl": 600.0}


def join() -> Cluster:
    """Meet the other ranks, form the group of all ranks, and return this rank's Cluster.

    If the others train on after this rank has died, and take it back, there is no group yet (survivors.py).
    Raise CommError if a variable has an invalid value, if the store cannot be opened or reached, if a rank is
    missing or has died, if two processes claim the same rank, or if the world sizes differ. An error that one
    rank finds after it has reached the store is raised on all ranks.
    """
    liveness.forget()
    rank, world_size = rank_and_world_size()
    refuse_ipv6(master()[0])
    end_with_launcher(rank)
    hide_torch_warnings()
    local_rank = number("LOCAL_RANK") or 0
    check_interface()
    device, backend, gpu = choose_device(local_rank)
    timeout, op_timeout = seconds("JOIN_TIMEOUT", 60.0), seconds("OP_TIMEOUT", OP_SECONDS[backend])

    # 1. The store.
    deadline = time.monotonic() + timeout
    store = dist.HashStore() if world_size == 1 else meeting_store(rank, deadline)
    # A worker that torchrun restarts after a crash must not find the keys of the dead worker.
    store = dist.PrefixStore(f"attempt_{restart_count()}", store)
    _listen_on_one_interface(world_size)
    meeting = Meeting(store, rank, world_size)
    try:
        if sharing := meeting.comes_back():
            share_cores(sharing)
            choose_vector_math()
            return Cluster(rank, world_size, local_rank, device, dist.PrefixStore("lab", store))
        # 2. and 3. Meet, and connect to rank 0.
        share_cores(meeting.meet(deadline, timeout, gpu) if world_size > 1 else 1)
        choose_vector_math()
        # 4. The group.
        _form_group(backend, device, meeting, op_timeout)
        if backend == "nccl" and world_size > 1:
            liveness.end_after_a_death()
    except dist.DistError as error:
        gone = liveness.cause() or liveness.Departure(0, "died")  # rank 0 hosts the store
        raise CommError(f"The group cannot form: {gone}.") from error
    return Cluster(rank, world_size, local_rank, device, dist.PrefixStore("lab", store))


def leave(cluster: Cluster) -> None:
    """Leave the group, after the work of threads. Rank 0 leaves last, because it hosts the store."""
    complete()
    liveness.finish()
    dist.destroy_process_group()
    liveness.wait_for_the_others(10.0)
    liveness.forget()


def _form_group(backend: str, device: torch.device, meeting: Meeting, op_timeout: float) -> None:
    """Let torch connect all ranks. It waits for a dead rank until the timeout, but this function does not."""

    # Collectives of several groups may run at once: in the order of their launches, equal on all ranks, none
    # waits for the place on the GPU that another one holds. Plain messages have no such order (channels.py).
    if backend == "nccl":
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

    def form() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the current device belongs to a thread
        # Without `device_id`, with which nccl would connect all ranks at once: comm/channels.py makes groups
        # whose connections are opened by the first message.
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", meeting.store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=op_timeout),
        )

    def raise_if_one_has_gone() -> bool:
        # Do not ask the store here: the thread may hold the store's lock.
        if gone := liveness.cause(0):
            raise CommError(f"The group cannot form: {gone}.")
        return False

    deadline = time.monotonic() + op_timeout
    try:
        within(math.inf, form, raise_if_one_has_gone)
    except CommError:
        raise
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if gone := liveness.cause():
            why = str(gone)
        elif "timeout" in first_line.lower() or "timed out" in first_line.lower():
            why = f"{meeting.who_is_stuck()} (OP_TIMEOUT is {op_timeout:g} s)"
        else:
            why = first_line
        raise meeting.give_up(f"The group cannot form: {why}.") from error
    keep_from_preempting()
    if meeting.world_size > 1:
        # Wait for all: a rank that failed now would break connections that others are still making.
        meeting.wait_for_all("formed", deadline)


def _listen_on_one_interface(world_size: int) -> None:
    """Let gloo listen on one interface: loopback if all ranks are here, else the one to MASTER_ADDR."""
    if sys.platform == "win32":
        return  # gloo uses other names for interfaces there
    host, _ = master()
    all_are_here = (number("LOCAL_WORLD_SIZE") or 1) == world_size
    if all_are_here or host == "localhost" or host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    elif (interface := own_interface()) not in (None, LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
