"""Open the store of a rendezvous on rank 0, on the interface of MASTER_ADDR, and connect the others to it.

Under torchrun the agent has opened a store already. It listens on all interfaces, and the processes that
torchrun starts cannot change that. The launcher of `make run` opens one on 127.0.0.1
(lab/launch/torchrun.py).
"""

import errno
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from comm.errors import CommError
from comm.membership.settings import master
from lab.launch.interface import is_loopback, open_store, resolved

_POLL = 0.05  # seconds between two attempts to connect
_TELL = 2.0  # seconds between two lines about a store that does not answer


def meeting_store(rank: int, deadline: float) -> dist.Store:
    """Return the store that all ranks share. Raise CommError if it cannot be opened or reached."""
    host, port = master()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not by_agent:
        return _open(host, port, _left(deadline))
    _wait_for_listener(rank, host, port, deadline)
    try:
        return _connect(host, port, _left(deadline))
    except RuntimeError as error:
        raise CommError(
            f"The program at {host}:{port} is not a rendezvous store; check MASTER_ADDR and MASTER_PORT."
        ) from error


def _open(host: str, port: int, timeout: timedelta) -> dist.Store:
    try:
        address = resolved(host)
        store = open_store(address, port, timeout)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise CommError(
                f"Port {port} on {host} is taken by another program; give all ranks another MASTER_PORT."
            ) from error
        raise CommError(
            f"cannot open the store at {host}:{port}; MASTER_ADDR must name the machine of rank 0."
        ) from error
    if is_loopback(address) and host not in ("localhost", address):
        print(
            f"rank 0: {host} is {address} on this machine (/etc/hosts), so ranks on other machines cannot "
            "reach it; if there are any, give all ranks an address of rank 0's machine that they can reach.",
            file=sys.stderr,
            flush=True,
        )
    return store


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _connect(host: str, port: int, timeout: timedelta) -> dist.Store:
    """Return a client of the store. A thread connects, because torch waits without a timeout."""
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
