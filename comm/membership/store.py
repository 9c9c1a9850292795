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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from comm.errors import CommError
from comm.membership.settings import master
from lab.launch.interface import open_store

_POLL = 0.05  # seconds between two attempts to connect
_TELL = 2.0  # seconds between two lines about a store that does not answer

T = TypeVar("T")


def meeting_store(rank: int, deadline: float) -> dist.Store:
    """Return the store that all ranks share. Raise CommError if it cannot be opened or reached."""
    host, port = master()
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not by_agent:
        return _open(host, port, _left(deadline))
    _wait_for_listener(rank, host, port, deadline)
    left = _left(deadline)
    try:
        connect = partial(dist.TCPStore, host, port, is_master=False, timeout=left)
        return within(left.total_seconds(), connect)
    except (RuntimeError, TimeoutError) as error:
        raise CommError(
            f"The program at {host}:{port} is not a rendezvous store; check MASTER_ADDR and MASTER_PORT."
        ) from error


def _open(host: str, port: int, timeout: timedelta) -> dist.Store:
    try:
        return open_store(socket.gethostbyname(host), port, timeout)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise CommError(
                f"Port {port} on {host} is taken by another program; give all ranks another MASTER_PORT."
            ) from error
        raise CommError(
            f"cannot open the store at {host}:{port}; MASTER_ADDR must name the machine of rank 0."
        ) from error


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def within(seconds: float, action: Callable[[], T], gives_up: Callable[[], bool] = lambda: False) -> T:
    """Return what `action` returns. Raise TimeoutError after `seconds`, or once `gives_up()` is true.

    The action runs in a thread, because torch waits for a lost store or rank without an end, or too long.
    """
    outcome: list[T | Exception] = []

    def run() -> None:
        try:
            outcome.append(action())
        except Exception as error:
            outcome.append(error)

    thread, deadline = threading.Thread(target=run, daemon=True), time.monotonic() + seconds
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline and not gives_up():
        thread.join(_POLL)
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


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
