"""Find out which rank died: each has a connection to rank 0, which the kernel closes when the rank dies.

      rank 0 ──┐
      rank 1 ──┼──► a thread of rank 0, which tells all which ranks have gone, how, and in which order
      rank 2 ──┘

gloo shows a death to the neighbours of the dead rank only. They give up, then their own neighbours lose
*them*, and in the end three ranks blame three different ranks. With these connections all ranks name the
one that died first. A rank also announces here that it has finished, or that it has failed and why. A rank
that is stuck or paused stays connected: only a timeout shows it.
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch.distributed as dist

from lab.launch.interface import own_address

_KEY = "liveness"
LONGEST = 1 << 16  # bytes of a message
_AT_MOST_0_1_S = struct.pack("ll", 0, 100_000)  # for the rest of a message, which a rank sends in one piece
_GONE_MS = 3000  # after which a machine that acknowledges nothing has gone; two packets may be lost meanwhile
_PATIENCE = 1.0  # seconds until all ranks know what one connection has shown


@dataclass(frozen=True)
class Departure:
    """A rank that has left, and how. `str()` gives a clause for an error message."""

    rank: int
    how: Literal["died", "failed", "finished"]
    why: str = ""

    def __str__(self) -> str:
        if self.how == "finished":
            return f"rank {self.rank} has finished, and every rank must take the same number of steps"
        if self.how == "failed" and self.why and "\n" not in self.why:
            return f"rank {self.rank} has failed: {self.why.removesuffix('.')}"
        return f"rank {self.rank} has {self.how}, so look for the first error in its log"


def send(connection: Connection, message: Any) -> None:
    """Send a message, unless the other end has gone."""
    with suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def listen(store: dist.Store) -> socket.socket:
    """Listen on rank 0 for the other ranks, and write its address into the store."""
    listener = socket.create_server((own_address(), 0))
    store.set(_KEY, json.dumps(listener.getsockname()))
    return listener


def accept(listener: socket.socket) -> Connection:
    """Return a connection to the rank that waits. It gives up after half a message (of another program)."""
    end, _ = listener.accept()
    watch_the_machine(end)
    if os.name == "posix":
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _AT_MOST_0_1_S)
    return Connection(end.detach())


def watch_the_machine(end: socket.socket) -> None:
    """Let the kernel break a connection to a machine that has gone, and so can send no sign of it (Linux)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)  # seconds
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)


class Server(threading.Thread):
    """The thread of rank 0. It ends when all ranks have come and left."""

    def __init__(self, listener: socket.socket, world_size: int) -> None:
        super().__init__(name="liveness", daemon=True)
        self._absent = set(range(world_size))
        self._strangers: set[Connection] = set()  # that have not said which rank they are
        self._members: dict[Connection, int] = {}
        self._left: set[int] = set()
        self._gone: list[Departure] = []
        self._listener = listener

    def run(self) -> None:
        with self._listener:
            while self._absent or self._members:
                for ready in wait([self._listener, *self._strangers, *self._members]):
                    if isinstance(ready, Connection):
                        self._take(ready)
                    else:
                        self._strangers.add(accept(self._listener))

    def _take(self, connection: Connection) -> None:
        try:
            message = json.loads(connection.recv_bytes(LONGEST))
            if connection in self._members:
                self._announce(Departure(self._members[connection], **message))
                return
            self._members[connection] = rank = int(message["rank"])
            self._strangers.remove(connection)
            self._absent.discard(rank)
            for gone in self._gone:
                send(connection, asdict(gone))
        except Exception:  # it has closed the connection, or is not a rank
            connection.close()
            self._strangers.discard(connection)
            if connection in self._members:
                self._announce(Departure(self._members[connection], "died"))
                del self._members[connection]

    def _announce(self, gone: Departure) -> None:
        if gone.rank not in self._left:
            self._left.add(gone.rank)
            self._gone.append(gone)
            # Rank 0 last: it may end as soon as it knows.
            for member in sorted(self._members, key=self._members.__getitem__, reverse=True):
                send(member, asdict(gone))


# What this rank knows about the others.
_rank = -1
_gone: list[Departure] = []  # in the order in which rank 0 noticed
_connection: Connection | None = None
_server: Server | None = None  # on rank 0
_lock = threading.Lock()  # several threads may listen


def connect(store: dist.Store, rank: int, world_size: int) -> None:
    """Connect to rank 0, on rank 0 too. Raise OSError if it cannot be reached."""
    global _rank, _connection, _server
    if rank == 0:
        _server = Server(listen(store), world_size)
        _server.start()
    _rank, _connection = rank, dial(store, rank)


def dial(store: dist.Store, rank: int) -> Connection:
    """Return a connection of this rank to rank 0. Raise OSError if it cannot be reached."""
    end = socket.create_connection(json.loads(store.get(_KEY)), timeout=5)
    end.settimeout(None)
    watch_the_machine(end)
    connection = Connection(end.detach())
    send(connection, {"rank": rank})
    return connection


def cause(patience: float = _PATIENCE) -> Departure | None:
    """Return the first rank that died or failed, else the first that finished, else None.

    It waits at most `patience` seconds for news, because one connection may show a death before another.
    """
    causes: list[Departure] = []
    for others in _news(patience):
        # A rank that has failed because of another one quotes the other's text in its reason.
        causes = [gone for gone in others if not any(str(o) in gone.why for o in others if o != gone)]
        if bad := [gone for gone in causes if gone.how != "finished"]:
            return bad[0]
    return causes[0] if causes else None


def fail(why: str, patience: float = _PATIENCE) -> bool:
    """Tell the others why this rank gives up. Return whether rank 0, another one, fails for the same reason.

    It waits at most `patience` seconds for rank 0, and does not wait if another failure is known already.
    Rank 0 waits until all others have been told.
    """
    if _connection is not None:
        send(_connection, {"how": "failed", "why": why})
    for others in _news(_PATIENCE if _rank == 0 else patience):
        if _rank == 0:
            if any(gone.rank == 0 for gone in _gone):
                break  # its thread tells rank 0 last
        elif Departure(0, "failed", why) in others:
            return others[0].how != "died"
        elif any(gone.why != why for gone in others):
            break
    return False


def end_after_a_death(grace: float = 2.0) -> None:
    """Let a thread end this process, with a sentence, `grace` seconds after another rank has died or failed.

    This is for nccl, where `wait()` does not raise: the host would wait for the GPU without end.
    """
    own = _connection

    def watch() -> None:
        while own is not None and own is _connection and not own.closed:
            gone = cause(patience=0.2)
            if gone is None or gone.how == "finished":
                continue
            time.sleep(grace)
            if own is _connection:  # it has neither finished nor found the error itself
                sentence = f"{gone}."
                if not fail(sentence):
                    print(f"rank {_rank}: {sentence}", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=watch, name="liveness", daemon=True).start()


def finish() -> None:
    """Tell the others that this rank has finished."""
    if _connection is not None:
        send(_connection, {"how": "finished"})
        with _lock:
            _connection.close()


def wait_for_the_others(seconds: float) -> None:
    """On rank 0, leave, and wait at most `seconds` until all have left."""
    if _server is not None and _connection is not None:
        _connection.close()
        _server.join(seconds)


def forget() -> None:
    """Forget the peers of an earlier group."""
    global _rank, _connection, _server
    _rank, _connection, _server = -1, None, None
    _gone.clear()


def _news(patience: float) -> Iterator[list[Departure]]:
    """Yield how the other ranks have left, now and after each change, for `patience` seconds."""
    deadline, left, more_may_come = time.monotonic() + patience, 0.0, True
    while left >= 0 and more_may_come:
        more_may_come = _hear(left)
        yield [gone for gone in _gone if gone.rank != _rank]
        left = deadline - time.monotonic()


def _hear(seconds: float) -> bool:
    """Wait at most `seconds` for news, and note all that has come. Return whether more may follow."""
    with _lock:
        if _connection is None or _connection.closed:
            return False
        try:
            while _connection.poll(seconds):
                _gone.append(Departure(**json.loads(_connection.recv_bytes())))
                seconds = 0
        except (EOFError, OSError):
            _connection.close()
            if 0 not in [gone.rank for gone in _gone]:
                _gone.append(Departure(0, "died"))
        return True
