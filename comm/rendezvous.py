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
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.wire import CommError
from lab.allocator import keep_freed_memory
from lab.cluster import Cluster
from lab.errors import WorkbookError

_POLL = 0.05  # seconds between two looks at the store
_TELL = 2.0  # seconds between two lines about who is missing
_LINGER = 1.0  # seconds a failed host keeps its store open, so that others can read why


def join() -> Cluster:
    """Meet the other ranks and form the group over all of them.

    Raises CommError with one sentence: a variable that makes no sense, a store that cannot be opened or
    reached, ranks that did not come, two that claim the same rank, or different world sizes.
    """
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
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
    timeout, op_timeout = _seconds("JOIN_TIMEOUT", 60.0), _seconds("OP_TIMEOUT", 60.0)
    local_rank = _number("LOCAL_RANK") or 0
    device, backend = _device(local_rank)

    deadline = time.monotonic() + timeout
    store = dist.HashStore() if world_size == 1 else _open_store(rank, deadline)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    if world_size > 1:
        _gather_everyone(store, rank, world_size, deadline, timeout)
    if _master()[0] in ("localhost", "127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
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


def _open_store(rank: int, deadline: float) -> dist.Store:
    host, port = _master()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        if rank == 0 and not by_agent:
            return dist.TCPStore(host, port, None, is_master=True, timeout=left, wait_for_workers=False)
        _wait_for_listener(rank, host, port, deadline)
        return _connect(host, port, left)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise CommError(
                f"Port {port} on {host} is taken by another program; give all ranks another MASTER_PORT."
            ) from error
        if isinstance(error, CommError):
            raise
        if rank == 0 and not by_agent:
            raise CommError(
                f"cannot open the store at {host}:{port}; MASTER_ADDR must name the machine of rank 0."
            ) from error
        raise CommError(
            f"What answers at {host}:{port} is not a rendezvous store; check MASTER_ADDR and MASTER_PORT."
        ) from error


def _connect(host: str, port: int, timeout: timedelta) -> dist.Store:
    """A client of the store. In a thread, for torch waits for the first answer without a timeout."""
    answer: list[dist.Store | RuntimeError] = []

    def connect() -> None:
        try:
            answer.append(dist.TCPStore(host, port, None, is_master=False, timeout=timeout))
        except RuntimeError as error:
            answer.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if not answer:
        raise RuntimeError("it does not answer")
    if isinstance(answer[0], RuntimeError):
        raise answer[0]
    return answer[0]


def _wait_for_listener(rank: int, host: str, port: int, deadline: float) -> None:
    next_word = time.monotonic() + _TELL
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError as error:
            reason = f"{error.strerror or error}".lower()
        now = time.monotonic()
        if now > deadline:
            raise CommError(
                f"cannot reach the store at {host}:{port} ({reason}); rank 0 opens it there, so "
                "check that it runs and that MASTER_ADDR and MASTER_PORT are the same on all ranks."
            )
        if now > next_word:
            print(f"rank {rank}: still waiting for {host}:{port} ({reason})", file=sys.stderr, flush=True)
            next_word = now + _TELL
        time.sleep(_POLL)


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


def _master() -> tuple[str, int]:
    port = _number("MASTER_PORT")
    if port is not None and port > 65535:
        raise CommError(f"MASTER_PORT is {port}; it must be at most 65535.")
    return os.environ.get("MASTER_ADDR") or "localhost", 29500 if port is None else port


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise CommError(f"{name} is {text!r}; it must be a whole number.")
    return int(text) if text else None


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise CommError(f"{name} is {text!r}; it must be a number of seconds above 0.")
    return seconds


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _say(rank: int, world_size: int, what: str) -> None:
    """One line about the rendezvous, on stderr."""
    print(f"rank {rank} of {world_size}: {what}", file=sys.stderr, flush=True)
