"""Let the ranks of a group connect to each other: a listener on each rank, and a hello on each connection.

      rank 1  ── connects ──►  rank 0            hello: the token of rank 0's listener, and "I am rank 1"

A connection carries messages in one direction, from the rank that has connected. So two ranks never have to
agree which of two connections they keep. All ranks know all addresses and tokens (streams.py exchanges them).
Another program may connect as well, but it does not know the token, and its connection is closed.

    TCP           on the interface that leads to the other ranks
    Unix socket   between ranks of one machine: less than half of TCP's time for a byte. The hello may bring
                  memory that both share (segment.py)
"""

import hashlib
import os
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from comm.transport import cross_memory, segment
from comm.transport.segment import Segment
from lab.launch.interface import own_address

_HELLO = struct.Struct("!qqQ")  # token, rank, address of the nonce in the segment
_TOKEN = struct.Struct("!q")
_HELLO_SECONDS = 2.0  # within which a connection must have said hello
_MOST_STRANGERS = 64  # connections that have not said hello yet; with more of them the oldest is closed
Address = tuple[int, int, int]  # IPv4 address, port (0 if there is none), token


@dataclass
class Arrival:
    """A connection that has said hello. `segment` is None if the messages go through its socket."""

    rank: int
    socket: socket.socket
    segment: Segment | None
    nonce_address: int


@dataclass
class _Stranger:
    deadline: float
    hello: bytes = b""
    descriptor: int | None = None


class Listener:
    """Accept the connections of `size` ranks without blocking, over TCP and (on Linux) a Unix socket."""

    def __init__(self, size: int, tcp: bool = True) -> None:
        self._token, self._size = secrets.randbits(62), size
        self._tcp = _tcp_listener() if tcp else socket.socket()
        self._listening = [self._tcp] if tcp else []
        self._strangers: dict[socket.socket, _Stranger] = {}
        if sys.platform == "linux":
            unix = socket.socket(socket.AF_UNIX)
            self._listening.append(unix)
            unix.bind(_name(self._token))
            unix.listen()
        for one in self._listening:
            one.setblocking(False)

    def address(self) -> Address:
        """Return what another rank needs to connect."""
        host, port = self._tcp.getsockname()
        return struct.unpack("!I", socket.inet_aton(host))[0], port, self._token

    def sockets(self) -> list[socket.socket]:
        """Return the sockets on which something may arrive."""
        return [*self._listening, *self._strangers]

    def has_strangers(self) -> bool:
        """Return whether a connection has not said hello yet."""
        return bool(self._strangers)

    def accept(self) -> list[Arrival]:
        """Return the connections that have said hello since the last call."""
        for listening in self._listening:
            with suppress(OSError):
                while True:
                    stranger, _ = listening.accept()
                    stranger.setblocking(False)
                    self._strangers[stranger] = _Stranger(time.monotonic() + _HELLO_SECONDS)
                    if len(self._strangers) > _MOST_STRANGERS:
                        self._close(next(iter(self._strangers)))
        return [known for stranger in list(self._strangers) if (known := self._hear(stranger))]

    def close(self) -> None:
        """Stop listening, and close the connections that have not said hello."""
        for stranger in list(self._strangers):
            self._close(stranger)
        for listening in self._listening:
            listening.close()

    def _hear(self, end: socket.socket) -> Arrival | None:
        """Read more of a hello. Return the connection if the hello is complete and right, else None."""
        stranger = self._strangers[end]
        try:
            data = self._receive(end, stranger)
        except BlockingIOError:
            if time.monotonic() > stranger.deadline:
                self._close(end)
            return None
        except OSError:
            data = b""
        stranger.hello += data
        if data and len(stranger.hello) < _HELLO.size:
            return None
        arrival = self._checked(end, stranger) if data else None
        if arrival is None:
            self._close(end)
        else:
            del self._strangers[end]
        return arrival

    def _checked(self, end: socket.socket, stranger: _Stranger) -> Arrival | None:
        token, rank, nonce_address = _HELLO.unpack(stranger.hello)
        if token != self._token or not 0 <= rank < self._size:
            return None
        descriptor, stranger.descriptor = stranger.descriptor, None
        if descriptor is None:
            return Arrival(rank, end, None, 0)
        with suppress(OSError):
            return Arrival(rank, end, segment.attach(descriptor), nonce_address)
        return None

    def _receive(self, end: socket.socket, stranger: _Stranger) -> bytes:
        missing = _HELLO.size - len(stranger.hello)
        if end.family != socket.AF_UNIX:
            return end.recv(missing)
        data, descriptors, _, _ = socket.recv_fds(end, missing, 1)
        for descriptor in descriptors:
            if stranger.descriptor is None:
                stranger.descriptor = descriptor
            else:
                os.close(descriptor)
        return data

    def _close(self, end: socket.socket) -> None:
        stranger = self._strangers.pop(end)
        if stranger.descriptor is not None:
            os.close(stranger.descriptor)
        end.close()


def connect(address: Address, rank: int, seconds: float) -> socket.socket:
    """Connect to the listener at `address`, as `rank`. Raise OSError after that many `seconds`.

    It does not wait until the other rank accepts: the system of that rank completes the connection.
    """
    host, port, token = address
    connection = _unix_connection(token, seconds)
    if connection is None:
        place = socket.inet_ntoa(struct.pack("!I", host)), port
        connection = socket.create_connection(place, timeout=max(0.01, seconds))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HELLO.pack(token, rank, 0))
    connection.setblocking(False)
    return connection


def connect_locally(address: Address, rank: int, seconds: float) -> tuple[socket.socket, Segment] | None:
    """Connect to a listener of this machine, and share a segment with it. Return None if it is elsewhere."""
    *_, token = address
    connection = _unix_connection(token, seconds)
    if connection is None:
        return None
    try:
        shared, descriptor = segment.create()
        try:
            cross_memory.allow(cross_memory.peer_of(connection))
            hello = _HELLO.pack(token, rank, shared.nonce_address)
            socket.send_fds(connection, [hello], [descriptor])
        finally:
            os.close(descriptor)
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection, shared


def _unix_connection(token: int, seconds: float) -> socket.socket | None:
    """Connect to a listener of this machine. Return None if it is elsewhere, or in another container."""
    if sys.platform != "linux":
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(max(0.01, seconds))
    try:
        connection.connect(_name(token))
    except OSError:
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
