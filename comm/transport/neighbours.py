"""How a rank finds its neighbours on a ring: it listens, tells all where, and connects to the right one.

    TCP           on the interface that leads to the others
    Unix socket   where memory is to be read (cross_memory.py): neighbours on one machine meet there,
                  and the kernel tells each which process the other is

Another program may find the port or the name, so the left neighbour has to show a token.
"""

import secrets
import socket
import struct
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Self

from comm.membership import liveness
from lab.interface import own_address

_TOKEN = struct.Struct("!q")
_TOKEN_SECONDS = 2.0  # for a connection to show the token
_LOOK_SECONDS = 0.2  # between two looks whether a rank has died


class Listeners:
    """Listens for the left neighbour; leaving the `with` stops listening."""

    def __init__(self, unix: bool) -> None:
        self._token = secrets.randbits(62)
        self._tcp = _tcp_listener()
        self._sockets = [self._tcp]
        if unix:
            local = socket.socket(socket.AF_UNIX)
            self._sockets.append(local)
            local.bind(_name(self._token))
            local.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._sockets:
            listener.close()

    def row(self) -> tuple[int, int, int]:
        """Return what the left neighbour needs: IPv4 address, port (0 without a network) and token."""
        host, port = self._tcp.getsockname()
        return struct.unpack("!I", socket.inet_aton(host))[0], port, self._token

    def accept(self, deadline: float) -> socket.socket:
        """Return the connection that shows the token; any other, a silent one too, is closed.

        OSError when the time is up, or a rank has died meanwhile: it may be the one that should connect.
        """
        while (left := deadline - time.monotonic()) > 0:
            if (gone := liveness.cause(0)) and gone.how != "finished":
                raise ConnectionError(str(gone))
            for listener in wait(self._sockets, min(left, _LOOK_SECONDS)):
                assert isinstance(listener, socket.socket)
                listener.settimeout(left)
                connection, _ = listener.accept()
                connection.settimeout(min(left, _TOKEN_SECONDS))
                with suppress(OSError):
                    if connection.recv(_TOKEN.size, socket.MSG_WAITALL) == _TOKEN.pack(self._token):
                        connection.settimeout(max(0.01, deadline - time.monotonic()))
                        return connection
                connection.close()
        raise TimeoutError("timed out")


def connect(row: tuple[int, int, int], unix: bool, deadline: float) -> socket.socket:
    """Connect to the right neighbour, which listens at `row`; if wanted, by its Unix socket where that is."""
    address, port, token = row
    host = socket.inet_ntoa(struct.pack("!I", address))
    seconds = max(0.01, deadline - time.monotonic())
    connection = _local(token, seconds) if unix else None
    if connection is None:
        connection = socket.create_connection((host, port), timeout=seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_TOKEN.pack(token))
    return connection


def _local(token: int, seconds: float) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    try:
        connection.connect(_name(token))
    except OSError:  # on another machine, or in another container
        connection.close()
        return None
    return connection


def _tcp_listener() -> socket.socket:
    """A listening socket on the interface that leads to the others; an unbound one if there is none."""
    try:
        return socket.create_server((own_address(), 0))
    except OSError:
        return socket.socket()


def _name(token: int) -> str:
    """The name of the Unix socket: an abstract one (Linux), which leaves no file."""
    return f"\0workbook-{token:016x}"
