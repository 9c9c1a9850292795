"""Find out which rank died: each has a connection to rank 0, which the kernel closes when the rank dies.

      rank 1 ──┐
      rank 2 ──┼──► rank 0, whose thread tells all others which ranks have gone, how, and in which order
      rank 3 ──┘

gloo shows a death to the neighbours of the dead rank only. They give up, then their own neighbours lose
*them*, and in the end three ranks blame three different ranks. With these connections all ranks name the
one that died first.

A rank also announces here that it has finished, or that it has failed and why. A client must show a token
from the store. A rank that is stuck or paused stays connected: only a timeout shows it.
"""

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch.distributed as dist

from lab.launch.interface import own_address

_LONGEST_LINE = 1 << 16


def json_line(message: Mapping[str, Any]) -> bytes:
    """Return the object as a line."""
    return json.dumps(message).encode() + b"\n"


class JsonLines:
    """Read JSON objects, one per line, from a non-blocking socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.rank: int | None = None
        self._rest = b""

    def read(self) -> tuple[list[dict], bool]:
        """Return the objects that have arrived, and whether more may arrive."""
        is_open = True
        try:
            data = self.end.recv(_LONGEST_LINE)
            is_open = bool(data)
        except BlockingIOError:
            data = b""
        except OSError:
            data, is_open = b"", False
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], False
        is_open = is_open and len(self._rest) < _LONGEST_LINE
        return [message for message in messages if isinstance(message, dict)], is_open


_KEY = "liveness"
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


class Liveness:
    """Hold what one rank knows about the others: a LivenessServer on rank 0, a LivenessClient elsewhere."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gone: list[Departure] = []  # in the order in which rank 0 noticed

    def cause(self, patience: float = _PATIENCE) -> Departure | None:
        """Return the first rank that died or failed, else the first that finished, else None.

        It waits at most `patience` seconds for news, because one connection may show a death before another.
        """
        deadline, known, left = time.monotonic() + patience, 0, 0.0
        while True:
            more_may_come = self._hear(left, known)
            known = len(self.gone)
            others = [gone for gone in self.gone if gone.rank != self.rank]
            causes = [gone for gone in others if not _follows(gone, others)]
            bad = [gone for gone in causes if gone.how != "finished"]
            left = deadline - time.monotonic()
            if bad or left <= 0 or not more_may_come:
                return next(iter(bad or causes), None)

    def finish(self) -> None:
        """Tell the others that this rank has finished."""
        raise NotImplementedError

    def fail(self, why: str, patience: float = _PATIENCE) -> bool:
        """Tell the others why this rank gives up. Return whether rank 0 fails for the same reason.

        It waits at most `patience` seconds for rank 0, and does not wait if another failure is known already.
        """
        raise NotImplementedError

    def _hear(self, seconds: float, known: int) -> bool:
        """Wait at most `seconds` until more than `known` ranks have gone. Return whether more may follow."""
        raise NotImplementedError


class LivenessServer(Liveness):
    """Rank 0's side of all connections. Its thread ends when all other ranks have left."""

    def __init__(self, store: dist.Store, world_size: int) -> None:
        super().__init__(0)
        self._token = secrets.token_hex(16)
        self._absent = set(range(1, world_size))
        self._clients: dict[int, socket.socket] = {}
        self._news = threading.Condition()
        self._listener = socket.create_server((own_address(), 0))
        address = self._listener.getsockname()
        threading.Thread(target=self._serve, name="liveness", daemon=True).start()
        store.set(_KEY, json.dumps([*address, self._token]))

    def finish(self) -> None:
        self._add(Departure(0, "finished"))

    def fail(self, why: str, patience: float = _PATIENCE) -> bool:
        self._add(Departure(0, "failed", why))
        return False

    def wait_until_alone(self, seconds: float) -> None:
        """Return when all other ranks have left, at the latest after `seconds`."""
        with self._news:
            self._news.wait_for(lambda: not self._absent and not self._clients, seconds)

    def _hear(self, seconds: float, known: int) -> bool:
        with self._news:
            self._news.wait_for(lambda: len(self.gone) > known, seconds)
        return True

    def _add(self, gone: Departure) -> None:
        with self._news:
            if gone.rank not in [earlier.rank for earlier in self.gone]:
                self.gone.append(gone)
                for rank, client in self._clients.items():
                    if rank != gone.rank:
                        with suppress(OSError):
                            client.sendall(json_line(asdict(gone)))
            self._news.notify_all()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._absent or self._clients:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        with suppress(OSError):
                            client, _ = self._listener.accept()
                            client.setblocking(False)
                            selector.register(client, selectors.EVENT_READ, JsonLines(client))
                    elif not self._take(key.data):
                        selector.unregister(key.fileobj)
                        key.data.end.close()
                if not self._absent and self._listener.fileno() >= 0:
                    selector.unregister(self._listener)
                    self._listener.close()

    def _take(self, lines: JsonLines) -> bool:
        """Handle what a connection has received. Return False if it has ended or shows no valid token."""
        messages, is_open = lines.read()
        for message in messages:
            if lines.rank is not None:
                self._add(Departure(lines.rank, message["how"], message["why"]))
            elif message.get("token") != self._token:
                return False
            else:
                lines.rank = int(message["rank"])
                with self._news:
                    self._absent.discard(lines.rank)
                    self._clients[lines.rank] = lines.end
                    with suppress(OSError):  # the rank may be gone already
                        for gone in self.gone:
                            lines.end.sendall(json_line(asdict(gone)))
        if not is_open and lines.rank is not None:
            with self._news:
                self._clients.pop(lines.rank, None)
            self._add(Departure(lines.rank, "died"))
        return is_open


class LivenessClient(Liveness):
    """Another rank's side of its connection to rank 0. Raise OSError if rank 0 cannot be reached."""

    def __init__(self, rank: int, host: str, port: int, token: str) -> None:
        super().__init__(rank)
        self._end = socket.create_connection((host, port), timeout=5)
        self._end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._end, selectors.EVENT_READ)
        self._lines, self._lock = JsonLines(self._end), threading.Lock()
        self._end.sendall(json_line({"rank": rank, "token": token}))

    def finish(self) -> None:
        self._tell(Departure(self.rank, "finished"))
        self._close()

    def fail(self, why: str, patience: float = _PATIENCE) -> bool:
        self._tell(Departure(self.rank, "failed", why))
        deadline = time.monotonic() + patience
        while True:
            if self.gone and self.gone[0].how != "died" and Departure(0, "failed", why) in self.gone:
                return True
            left = deadline - time.monotonic()
            if left <= 0 or any(gone.why != why for gone in self.gone):  # rank 0 fails for another reason
                return False
            if not self._hear(left, len(self.gone)):
                return False

    def _close(self) -> None:
        self._selector.close()
        self._end.close()

    def _tell(self, gone: Departure) -> None:
        with suppress(OSError):
            self._end.sendall(json_line(asdict(gone)))

    def _hear(self, seconds: float, known: int) -> bool:
        with self._lock:
            if self._end.fileno() < 0:
                return False
            if self._selector.select(seconds):
                messages, is_open = self._lines.read()
                self.gone += [Departure(**message) for message in messages]
                if not is_open:
                    self._close()
                    if 0 not in [gone.rank for gone in self.gone]:
                        self.gone.append(Departure(0, "died"))
        return True


def _follows(gone: Departure, others: list[Departure]) -> bool:
    """Return whether a rank has failed because of another: its reason quotes the other's text."""
    return any(str(other) in gone.why for other in others if other is not gone)


_of_this_process: Liveness | None = None


def connect(store: dist.Store, rank: int, world_size: int) -> bool:
    """Connect to rank 0, or serve on rank 0. Return False if its address is not in the store yet.

    Raise OSError if this rank has no connection. Then the others go on without rank 0, or without this rank.
    """
    global _of_this_process
    if rank == 0:
        try:
            _of_this_process = LivenessServer(store, world_size)
        except OSError:
            store.set(_KEY, "[]")  # or the others would wait for it
            raise
    elif not store.check([_KEY]):
        return False
    elif place := json.loads(store.get(_KEY)):
        _of_this_process = LivenessClient(rank, *place)
    return True


def current() -> Liveness | None:
    """Return what this process knows about its peers; None before `comm.rendezvous.join`."""
    return _of_this_process


def cause(patience: float = _PATIENCE) -> Departure | None:
    """Return the rank that has caused a failure of this rank, see Liveness.cause."""
    return None if _of_this_process is None else _of_this_process.cause(patience)


def finish() -> None:
    """Tell the others that this rank has finished."""
    if _of_this_process is not None:
        _of_this_process.finish()


def fail(why: str, patience: float = _PATIENCE) -> bool:
    """Tell the others why this rank gives up, and return whether rank 0 does too, see Liveness.fail."""
    return _of_this_process is not None and _of_this_process.fail(why, patience)


def wait_for_the_others(seconds: float) -> bool:
    """On rank 0, wait at most `seconds` until all others have left. Elsewhere return False at once."""
    if not isinstance(_of_this_process, LivenessServer):
        return False
    _of_this_process.wait_until_alone(seconds)
    return True


def forget() -> None:
    """Forget the peers of an earlier group."""
    global _of_this_process
    _of_this_process = None
