"""Connect the ranks of a group by sockets, and move a queue of messages through a socket without blocking.

      rank 1  ── connects ──►  rank 0            hello: the token of rank 0's listener, and "I am rank 1"

A connection carries messages in one direction, from the rank that has connected. So two ranks never have to
agree which of two connections they keep. All ranks know all addresses and tokens (streams.py). Ranks of one
machine use a Unix socket, which takes less than half of TCP's time for a byte. Its hello may bring memory
that both share (shared_memory.py).
"""

import hashlib
import os
import secrets
import select
import socket
import struct
import sys
from contextlib import suppress

from comm.wire import shared_memory
from comm.wire.shared_memory import End, OutEnd, RingBuffer
from lab.launch.interface import own_address

_HELLO = struct.Struct("!qq")  # token, rank
_HELLO_SECONDS = 2.0  # for which a rank waits for the hello of a connection
_MOST_AT_ONCE = 8  # messages in one call of the kernel: with 1, 64 of 256 bytes took 1.2 times as long
Address = tuple[int, int, int]  # IPv4 address, port (0 if there is none), token
Arrival = tuple[
    int, socket.socket, RingBuffer | None
]  # None: the messages of this rank go through its socket


class Listener:
    """Accept the connections of `size` ranks, over TCP and (on Linux) a Unix socket."""

    def __init__(self, size: int) -> None:
        self._token, self._size = secrets.randbits(62), size
        try:  # on the interface that leads to the others
            self._tcp = socket.create_server((own_address(), 0))
        except OSError:
            self._tcp = socket.socket()  # without a port
        self.sockets = [self._tcp]  # on which a rank may connect
        if sys.platform == "linux":
            unix = socket.socket(socket.AF_UNIX)
            self.sockets.append(unix)
            unix.bind(_name(self._token))
            unix.listen()
        for one in self.sockets:
            one.setblocking(False)

    def address(self) -> Address:
        host, port = self._tcp.getsockname()
        return struct.unpack("!I", socket.inet_aton(host))[0], port, self._token

    def accept(self) -> list[Arrival]:
        """Return the ranks that have connected since the last call. Close what other programs open."""
        arrivals = []
        for listening in self.sockets:
            with suppress(OSError):
                while True:
                    end, _ = listening.accept()
                    if arrival := self._welcomed(end):
                        arrivals.append(arrival)
                    else:
                        end.close()
        return arrivals

    def _welcomed(self, end: socket.socket) -> Arrival | None:
        """Read the hello, which a rank sends at once. Return the connection, or None if it is not right."""
        end.settimeout(_HELLO_SECONDS)
        descriptors: list[int] = []
        try:
            if end.family == socket.AF_UNIX:
                hello, descriptors, _, _ = socket.recv_fds(end, _HELLO.size, 1)
            else:
                hello = end.recv(_HELLO.size)
            token, rank = _HELLO.unpack(hello)
            if token != self._token or not 0 <= rank < self._size:
                return None
            end.setblocking(False)
            return rank, end, RingBuffer(descriptors[0]) if descriptors else None
        except (OSError, struct.error):
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        for listening in self.sockets:
            listening.close()


def connect(
    address: Address, rank: int, seconds: float, share: bool
) -> tuple[socket.socket, RingBuffer | None]:
    """Connect to the listener at `address`, as `rank`. Raise OSError after that many `seconds`.

    On the same machine `share` makes a ring buffer, too. It does not wait until the other rank accepts: the
    system of that rank completes the connection.
    """
    host, port, token = address
    connection, buffer = _unix_connection(token, seconds), None
    hello = _HELLO.pack(token, rank)
    if connection is None:
        place = socket.inet_ntoa(struct.pack("!I", host)), port
        connection = socket.create_connection(place, timeout=max(0.01, seconds))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(hello)
    elif share:
        buffer, descriptor = shared_memory.create()
        socket.send_fds(connection, [hello], [descriptor])
        os.close(descriptor)
    else:
        connection.sendall(hello)
    connection.setblocking(False)
    return connection, buffer


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


def _name(token: int) -> str:
    """Return the name of the Unix socket. It is abstract (Linux), so it leaves no file.

    Every process can list these names, so it does not contain the token but a checksum of it.
    """
    return f"\0workbook-{hashlib.sha256(str(token).encode()).hexdigest()[:16]}"


class StreamOut(OutEnd):
    """The end of a socket into which this rank sends. A message is done when the kernel has its last byte."""

    def push(self) -> bool:
        """Give the kernel as much as it takes. Return whether it has taken anything."""
        if not self._queue:
            return False
        try:
            if len(self._queue) == 1:
                sent = self.socket.send(self._queue[0][0])
            else:
                sent = self.socket.sendmsg([data for data, _ in list(self._queue)[:_MOST_AT_ONCE]])
        except BlockingIOError:
            return False
        while sent:
            data, transfer = self._queue.popleft()
            if sent < len(data):
                self._queue.appendleft((data[sent:], transfer))
                break
            sent -= len(data)
            transfer.done = True
        return True

    def num_taken(self) -> int:
        try:
            confirmed = len(self.socket.recv(4096))
        except BlockingIOError:
            return 0
        if not confirmed:
            raise ConnectionError("it closed the connection")
        return confirmed

    def events(self, waits_for_confirmation: bool) -> int:
        return (select.POLLOUT if self._queue else 0) | (select.POLLIN if waits_for_confirmation else 0)


class StreamIn(End):
    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._unconfirmed = 0

    def receive(self, data: memoryview) -> int:
        try:
            received = self.socket.recv_into(data)
        except BlockingIOError:
            return 0
        if not received:
            raise ConnectionError("it closed the connection")
        return received

    def confirm(self) -> None:
        """Tell the sender that a message was taken: a byte back, as the socket is free that way."""
        self._unconfirmed += 1
        with suppress(BlockingIOError):
            self._unconfirmed -= self.socket.send(bytes(self._unconfirmed))
