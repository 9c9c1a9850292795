"""A listener takes the connections of its group's ranks, and no other program's, whatever that sends."""

import random
import socket
import struct
import time

import pytest

from comm.transport import sockets as module
from comm.transport.sockets import Arrival, Listener, connect

HELLO = struct.Struct("!qq")


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(module, "_HELLO_SECONDS", 0.02)
    made = Listener(size=4)
    yield made
    made.close()


def arrivals(listener: Listener, seconds: float = 0.2) -> list[Arrival]:
    """Return what arrives within the time, and sooner if anything does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := listener.accept():
            return found
        time.sleep(0.001)
    return []


def knock(listener: Listener, data: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", listener.address()[1]))
    stranger.sendall(data)
    return stranger


def is_closed(end: socket.socket) -> bool:
    end.settimeout(1)
    try:
        return end.recv(1) == b""
    except ConnectionError:
        return True


def test_strangers_are_not_let_in_and_keep_no_rank_out(listener):
    _, _, token = listener.address()
    wrong_token, no_rank = HELLO.pack(token ^ 1, 1), HELLO.pack(token, 4)
    source = random.Random(1)
    strangers = [knock(listener, data) for data in (b"", b"abc", wrong_token, no_rank, HELLO.pack(token, -1))]
    for _ in range(20):
        strangers.append(knock(listener, source.randbytes(source.randrange(60))))
        assert arrivals(listener, 0.002) == []
    reset = knock(listener, b"")
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    with connect(listener.address(), 1, 5.0):
        [arrival] = arrivals(listener)
        assert arrival.rank == 1
        arrival.socket.close()
    assert is_closed(strangers[2]) and is_closed(strangers[3]) and is_closed(strangers[4])
    for stranger in strangers:
        stranger.close()
