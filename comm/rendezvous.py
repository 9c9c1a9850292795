"""Rendezvous: how processes that know nothing but an address become ranks of one group.

      rank 0                        rank 1                       everyone
      opens the store at            connects to it, as often     writes who it is, counts who has come,
      MASTER_ADDR:MASTER_PORT       as it takes                  says who is missing; then the group forms

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

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.settings import master, number, seconds
from comm.store import meeting_store
from comm.wire import CommError
from lab.allocator import keep_freed_memory
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.interface import LOOPBACK, own_interface
from lab.launcher import end_with_launcher
from lab.threads import choose_vector_math, cores_id, share_cores

_POLL = 0.05  # seconds between two looks at the store
_TELL = 2.0  # seconds between two lines about who is missing
_LINGER = 1.0  # seconds a failed host keeps its store open, so that others can read why


def join() -> Cluster:
    """Meet the other ranks and form the group over all of them.

    Raises CommError with one sentence: a variable that makes no sense, a store that cannot be opened or
    reached, ranks that did not come, two that claim the same rank, or different world sizes.
    """
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    if rank is None and world_size is None:
        rank, world_size = 0, 1
    if rank is None or world_size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise CommError(f"{missing} is not set; start the script with torchrun, make run or docker-compose.")
    if not 0 <= rank < world_size:
        raise CommError(
            f"RANK is {rank}, but with WORLD_SIZE {world_size} it must be in 0..{world_size - 1}."
        )
    keep_freed_memory()
    end_with_launcher(rank)
    timeout, op_timeout = seconds("JOIN_TIMEOUT", 60.0), seconds("OP_TIMEOUT", 60.0)
    local_rank = number("LOCAL_RANK") or 0
    device, backend = _device(local_rank)

    deadline = time.monotonic() + timeout
    store = dist.HashStore() if world_size == 1 else meeting_store(rank, deadline)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    sharing = f"cores/{cores_id()}"
    store.add(sharing, 1)
    if world_size > 1:
        _gather_everyone(store, rank, world_size, deadline, timeout)
    share_cores(store.add(sharing, 0))
    choose_vector_math()
    _listen_on_one_interface(world_size)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=op_timeout),
    )
    return Cluster(rank, world_size, local_rank, device, dist.PrefixStore("lab", store))


def leave(cluster: Cluster) -> None:
    """Take leave together: the rank that hosts the store goes last, so that nobody loses it."""
    with suppress(RuntimeError):
        arrived = cluster.store.add("left", 1)
        deadline = time.monotonic() + 10
        while cluster.is_main and arrived < cluster.world_size and time.monotonic() < deadline:
            time.sleep(_POLL)
            arrived = cluster.store.add("left", 0)
    dist.destroy_process_group()


@contextmanager
def joined() -> Iterator[Cluster]:
    """`with joined() as cluster:` joins, and leaves at the end.

    An error whose text says it all is printed as one line, and the process exits with its code.
    """
    try:
        cluster = join()
        yield cluster
    except WorkbookError as error:
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        # Not sys.exit: destructors of a broken group would wait for peers that are gone.
        os._exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"rank {os.environ.get('RANK', '0')}: interrupted.", file=sys.stderr, flush=True)
        os._exit(130)
    leave(cluster)


def _gather_everyone(store: dist.Store, rank: int, world_size: int, deadline: float, timeout: float) -> None:
    me = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": world_size}
    entry = json.dumps(me)
    seated = store.compare_set(f"rank/{rank}", "", entry).decode()
    if seated != entry:
        other = json.loads(seated)
        raise _give_up(
            store,
            rank,
            f"Two processes claim rank {rank}: process {other['pid']} on {other['host']} and process "
            f"{me['pid']} on {me['host']}; give each its own RANK.",
        )
    _say(rank, world_size, f"here as process {me['pid']} on {me['host']}")
    next_word = time.monotonic() + _TELL
    present: dict[int, dict] = {}
    while len(present) < world_size:
        if store.check(["failed"]):
            raise _give_up(store, rank, "")
        for peer in range(world_size):
            if peer not in present and store.check([f"rank/{peer}"]):
                present[peer] = json.loads(store.get(f"rank/{peer}"))
                if present[peer]["world_size"] != world_size:
                    raise _give_up(
                        store,
                        rank,
                        f"Rank {rank} was started with WORLD_SIZE {world_size}, but rank {peer} with "
                        f"{present[peer]['world_size']}; all ranks need the same.",
                    )
        missing = [peer for peer in range(world_size) if peer not in present]
        now = time.monotonic()
        if missing and now > deadline:
            raise _give_up(
                store,
                rank,
                f"{_ranks(missing)} of {world_size} did not come within {timeout:g} s; look into their logs, "
                "or start them with the same MASTER_ADDR and MASTER_PORT (JOIN_TIMEOUT waits longer).",
            )
        if missing and now > next_word:
            _say(rank, world_size, f"still waiting for {_ranks(missing)}")
            next_word = now + _TELL
        if missing:
            time.sleep(_POLL)
    # A rank that failed now would find nobody listening: all stay until all have seen all.
    store.add("seen", 1)
    while store.add("seen", 0) < world_size and time.monotonic() < deadline:
        if store.check(["failed"]):
            raise _give_up(store, rank, "")
        time.sleep(_POLL / 10)
    if rank == 0:
        _say(rank, world_size, f"all {world_size} ranks have met")


def _give_up(store: dist.Store, rank: int, reason: str) -> CommError:
    """The error to raise: the first reason that any rank has written down, the same for all."""
    with suppress(RuntimeError):
        reason = store.compare_set("failed", "", reason).decode()
        if rank == 0:
            time.sleep(_LINGER)
    return CommError(reason)


def _device(local_rank: int) -> tuple[torch.device, str]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = os.environ.get("BACKEND") or ("nccl" if gpus else "gloo")
    if backend not in ("gloo", "nccl"):
        raise CommError(f"BACKEND is {backend!r}; it must be gloo or nccl.")
    if not gpus:
        if backend == "nccl":
            raise CommError("BACKEND is nccl, but there is no GPU here; leave it out or choose gloo.")
        return torch.device("cpu"), backend
    if backend == "nccl" and local_rank >= gpus:
        raise CommError(
            f"LOCAL_RANK is {local_rank}, but there are only {gpus} GPUs and nccl wants one for each rank; "
            "start fewer ranks, or let them share with BACKEND=gloo."
        )
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device, backend


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


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _say(rank: int, world_size: int, what: str) -> None:
    """One line about the rendezvous, on stderr."""
    print(f"rank {rank} of {world_size}: {what}", file=sys.stderr, flush=True)
