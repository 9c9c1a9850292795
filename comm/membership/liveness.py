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
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

from lab.launch.interface import own_address

_KEY = "liveness"
_LONGEST_LINE = 1 << 16
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


class Connection:
    """A connection between a rank and the thread of rank 0, of which either end may close it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end, self.rank, self._rest = end, -1, b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, unless the other end has gone."""
        with suppress(OSError):
            self.end.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> tuple[list[dict], bool]:
        """Return the messages that have arrived, and whether more may arrive."""
        try:
            data = self.end.recv(_LONGEST_LINE)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], False
        is_open = bool(data) and len(self._rest) < _LONGEST_LINE
        return [message for message in messages if isinstance(message, dict)], is_open


class Server(threading.Thread):
    """The thread of rank 0. It ends when all ranks have come and left."""

    def __init__(self, world_size: int) -> None:
        super().__init__(name="liveness", daemon=True)
        self._token, self._absent = secrets.token_hex(16), set(range(world_size))
        self._members: dict[int, Connection] = {}
        self._gone: dict[int, Departure] = {}
        self._listener = socket.create_server((own_address(), 0))
        self.place = [*self._listener.getsockname(), self._token]

    def run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._absent or self._members:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        with suppress(OSError):
                            end, _ = self._listener.accept()
                            selector.register(end, selectors.EVENT_READ, Connection(end))
                    elif not self._take(key.data):
                        selector.unregister(key.fileobj)
                        key.data.end.close()

    def _take(self, connection: Connection) -> bool:
        """Handle what has arrived. Return False if the connection has ended or shows no valid token."""
        messages, is_open = connection.read()
        for message in messages:
            if connection.rank >= 0:
                self._announce(Departure(connection.rank, message["how"], message["why"]))
            elif message.get("token") != self._token:
                return False
            else:
                connection.rank = int(message["rank"])
                self._absent.discard(connection.rank)
                self._members[connection.rank] = connection
                for gone in self._gone.values():
                    connection.send(asdict(gone))
        if not is_open and connection.rank >= 0:
            self._members.pop(connection.rank, None)
            self._announce(Departure(connection.rank, "died"))
        return is_open

    def _announce(self, gone: Departure) -> None:
        if gone.rank not in self._gone:
            self._gone[gone.rank] = gone
            for rank in sorted(self._members, reverse=True):  # rank 0 last: it may end as soon as it knows
                self._members[rank].send(asdict(gone))


class Liveness:
    """Hold what one rank knows about the others. Raise OSError if rank 0 cannot be reached."""

    def __init__(self, rank: int, host: str, port: int, token: str) -> None:
        self.rank = rank
        self.gone: list[Departure] = []  # in the order in which rank 0 noticed
        self._connection = Connection(socket.create_connection((host, port), timeout=5))
        self._lock = threading.Lock()
        self._connection.send({"rank": rank, "token": token})

    def cause(self, patience: float = _PATIENCE) -> Departure | None:
        """Return the first rank that died or failed, else the first that finished, else None.

        It waits at most `patience` seconds for news, because one connection may show a death before another.
        """
        deadline, left = time.monotonic() + patience, 0.0
        while True:
            more_may_come = self._hear(left)
            others = [gone for gone in self.gone if gone.rank != self.rank]
            # A rank that has failed because of another one quotes the other's text in its reason.
            causes = [gone for gone in others if not any(str(o) in gone.why for o in others if o != gone)]
            bad = [gone for gone in causes if gone.how != "finished"]
            left = deadline - time.monotonic()
            if bad or left <= 0 or not more_may_come:
                return next(iter(bad or causes), None)

    def tell(self, gone: Departure) -> None:
        """Tell the others how this rank leaves."""
        self._connection.send(asdict(gone))

    def is_rank_0_failing(self, why: str, patience: float) -> bool:
        """Return whether rank 0 fails for this reason too. Do not wait if it fails for another one."""
        deadline = time.monotonic() + patience
        while True:
            others = [gone for gone in self.gone if gone.rank != self.rank]
            if Departure(0, "failed", why) in others:
                return others[0].how != "died"
            left = deadline - time.monotonic()
            if left <= 0 or any(gone.why != why for gone in others) or not self._hear(left):
                return False

    def close(self) -> None:
        with self._lock:
            self._connection.end.close()

    def _hear(self, seconds: float) -> bool:
        """Wait at most `seconds` for news. Return whether more may follow."""
        with self._lock:
            end = self._connection.end
            if end.fileno() < 0:
                return False
            with selectors.DefaultSelector() as selector:
                selector.register(end, selectors.EVENT_READ)
                if not selector.select(seconds):
                    return True
            messages, is_open = self._connection.read()
            self.gone += [Departure(**message) for message in messages]
            if not is_open:
                end.close()
                if 0 not in [gone.rank for gone in self.gone]:
                    self.gone.append(Departure(0, "died"))
            return True


_own: Liveness | None = None
_server: Server | None = None  # on rank 0


def connect(store: dist.Store, rank: int, world_size: int) -> bool:
    """Connect to rank 0, on rank 0 too. Return False if its address is not in the store yet.

    Raise OSError if this rank has no connection. Then the others go on without rank 0, or without this rank.
    """
    global _own, _server
    if rank == 0:
        try:
            _server = Server(world_size)
        except OSError:
            store.set(_KEY, "[]")  # or the others would wait for it
            raise
        _server.start()
        store.set(_KEY, json.dumps(_server.place))
    elif not store.check([_KEY]):
        return False
    if place := json.loads(store.get(_KEY)):
        _own = Liveness(rank, *place)
    return True


def cause(patience: float = _PATIENCE) -> Departure | None:
    """Return the rank that has caused a failure of this rank, as Liveness.cause does."""
    return None if _own is None else _own.cause(patience)


def finish() -> None:
    """Tell the others that this rank has finished."""
    if _own is not None:
        _own.tell(Departure(_own.rank, "finished"))
        _own.close()


def fail(why: str, patience: float = _PATIENCE) -> bool:
    """Tell the others why this rank gives up. Return whether rank 0, another one, fails for the same reason.

    It waits at most `patience` seconds for rank 0, and does not wait if another failure is known already.
    """
    if _own is None:
        return False
    _own.tell(Departure(_own.rank, "failed", why))
    return _own.rank != 0 and _own.is_rank_0_failing(why, patience)


def wait_for_the_others(seconds: float) -> bool:
    """On rank 0, leave, and wait at most `seconds` until all have left. Elsewhere return False at once."""
    if _server is None or _own is None:
        return False
    _own.close()
    _server.join(seconds)
    return True


def forget() -> None:
    """Forget the peers of an earlier group."""
    global _own, _server
    _own = _server = None
