"""Rendezvous: how processes that know nothing but an address become ranks of one group.

      rank 0                        rank 1                       everyone
      opens the store at            connects to it, as often     writes who it is, counts who has come,
      MASTER_ADDR:MASTER_PORT       as it takes                  says who is missing; then the group forms
                                                                 (membership/liveness.py: who dies is named)

The store is a small key-value server (torch's TCPStore). Under torchrun the agent already runs one, and a
worker that is started again after a crash finds its dead predecessor's keys in it: so every attempt
gets a prefix of its own. Whoever finds that something cannot work writes the reason into the store,
and all that wait there give up with the same sentence instead of timing out one by one.

    RANK, WORLD_SIZE            who I am and how many we are; without both: one process alone
    MASTER_ADDR, MASTER_PORT    where the store is (localhost, 29500)
    LOCAL_RANK                  which of this machine's GPUs is mine (0)
    BACKEND                     gloo or nccl (nccl when there is a GPU)
    JOIN_TIMEOUT, OP_TIMEOUT    seconds to wait for the others (60), and in one operation (60)
    OMP_NUM_THREADS             threads of a rank (the machine's cores, divided by its ranks)
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.membership import gpus, liveness, meeting
from comm.membership.settings import check_interface, master, number, rank_and_world_size, seconds
from comm.membership.store import meeting_store
from comm.membership.watched_store import WatchedStore
from lab.allocator import keep_freed_memory
from lab.cluster import Cluster
from lab.interface import LOOPBACK, own_interface
from lab.launcher import end_with_launcher
from lab.threads import choose_vector_math, cores_id, share_cores
from lab.torch_log import hide_torch_warnings

_POLL = 0.05  # seconds between two looks at the others while the group forms


def join() -> Cluster:
    """Meet the other ranks and form the group over all of them.

    Raises CommError with one sentence: a variable that makes no sense, a store that cannot be opened or
    reached, ranks that did not come or died on the way, two that claim the same rank, or different world
    sizes. What one rank refuses after it has found the store, all refuse.
    """
    liveness.forget()
    rank, world_size = rank_and_world_size()
    master()
    keep_freed_memory()
    end_with_launcher(rank)
    hide_torch_warnings()
    local_rank = number("LOCAL_RANK") or 0
    timeout = op_timeout = 60.0
    device, backend, gpu, refusal = torch.device("cpu"), "gloo", "", ""
    try:
        timeout = seconds("JOIN_TIMEOUT", 60.0)
        op_timeout = seconds("OP_TIMEOUT", 60.0)
        check_interface()
        device, backend = gpus.choose_device(local_rank)
        gpu = gpus.name_of(device, backend)
    except CommError as error:
        refusal = str(error)

    deadline = time.monotonic() + timeout
    store = dist.HashStore() if world_size == 1 else meeting_store(rank, deadline)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    if not refusal:
        _listen_on_one_interface(world_size)
    sharing = f"cores/{cores_id()}"
    try:
        store.add(sharing, 1)
        if world_size > 1:
            meeting.meet(store, rank, world_size, deadline, timeout, gpu, refusal)
        elif refusal:
            raise CommError(refusal)
        share_cores(store.add(sharing, 0))
        choose_vector_math()
        _form_group(backend, device, store, rank, world_size, op_timeout)
    except dist.DistError as error:
        gone = liveness.cause() or "rank 0, which keeps the store, has died; look into its log"
        raise CommError(f"The group cannot form: {gone}.") from error
    return Cluster(rank, world_size, local_rank, device, WatchedStore("lab", store, op_timeout))


def leave(cluster: Cluster) -> None:
    """End this rank's part: the rank that hosts the store goes last, so that no rank loses it."""
    liveness.finish()
    dist.destroy_process_group()
    liveness.wait_for_the_others(10.0)
    liveness.forget()


def _form_group(
    backend: str, device: torch.device, store: dist.Store, rank: int, world_size: int, op_timeout: float
) -> None:
    """Have torch connect all ranks, in a thread: there it waits for a dead rank until its timeout."""
    outcome: list[RuntimeError | None] = []

    def form() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=op_timeout),
            )
            outcome.append(None)
        except RuntimeError as error:
            outcome.append(error)

    deadline = time.monotonic() + op_timeout
    thread = threading.Thread(target=form, name="form the group", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL)
        # Not at the store: the thread may hold its lock.
        if not outcome and (gone := liveness.cause(0)):
            raise CommError(f"The group cannot form: {gone}.")
    if outcome[0] is not None:
        first_line = str(outcome[0]).partition("\n")[0]
        if gone := liveness.cause():
            why = str(gone)
        elif "timeout" in first_line.lower() or "timed out" in first_line.lower():
            why = f"{meeting.who_is_stuck(store, rank, world_size)} (OP_TIMEOUT is {op_timeout:g} s)"
        else:
            why = first_line
        raise meeting.give_up(store, rank, f"The group cannot form: {why}.") from outcome[0]
    if world_size > 1:
        # A rank that failed now would break the connections that others are still making.
        meeting.wait_for_all(store, rank, world_size, "formed", deadline)


def _listen_on_one_interface(world_size: int) -> None:
    """Let gloo listen on the interface that leads to MASTER_ADDR; on the loopback if all ranks are here."""
    if sys.platform == "win32":
        return  # gloo knows interfaces by other names there
    host, _ = master()
    all_are_here = (number("LOCAL_WORLD_SIZE") or 1) == world_size
    if all_are_here or host == "localhost" or host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    elif (interface := own_interface()) not in (None, LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
