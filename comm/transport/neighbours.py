"""Connect a rank to its neighbours on a ring: it listens for the left one, and connects to the right one.

    TCP           on the interface that leads to the other ranks
    Unix socket   between neighbours on one machine that read each other's memory (cross_memory.py): over it
                  the kernel tells each neighbour the process id of the other

Another program may connect as well, so the left neighbour must show a token.
"""

import hashlib
import secrets
import socket
import struct
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Self

from lab.interface import own_address

_TOKEN = struct.Struct("!q")
_TOKEN_SECONDS = 2.0  # within which a connection must show the token


class Listeners:
    """Sockets that listen for the left neighbour, until the end of a `with` block."""

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
        """Return what the left neighbour needs to connect: IPv4 address, port (0 if there is none), token."""
        host, port = self._tcp.getsockname()
        return struct.unpack("!I", socket.inet_aton(host))[0], port, self._token

    def accept(self, deadline: float) -> socket.socket:
        """Return the connection that shows the token, and close all others.

        Raise OSError at the deadline.
        """
        while (left := deadline - time.monotonic()) > 0:
            for listener in wait(self._sockets, left):
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
    """Connect to the right neighbour, which listens at `row`: by Unix socket if wanted and possible."""
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
    """Return a socket that listens on the interface that leads to the others, or an unbound one."""
    try:
        return socket.create_server((own_address(), 0))
    except OSError:
        return socket.socket()


def _name(token: int) -> str:
    """Return the name of the Unix socket. It is abstract (Linux), so it leaves no file.

    Every process can list these names, so it does not contain the token but a checksum of it.
    """
    return f"\0workbook-{hashlib.sha256(_TOKEN.pack(token)).hexdigest()[:16]}"
