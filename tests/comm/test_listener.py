"""A listener takes the connections of its group's ranks, and no other program's, whatever that sends."""

import random
import socket
import struct
import time

from comm.wire import sockets
from lab.replace import replaced

HELLO = struct.Struct("!qq")


def arrivals(listener: sockets.Listener, seconds: float = 0.2) -> list[sockets.Arrival]:
    """Return what arrives within the time, and sooner if anything does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := listener.accept():
            return found
        time.sleep(0.001)
    return []


def test_strangers_are_not_let_in_and_keep_no_rank_out(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with replaced("comm.wire.sockets._HELLO_SECONDS", 0.02):
        listener = sockets.Listener(size=4)
        _, port, token = listener.address()
        source, strangers = random.Random(1), []
        wrong = [HELLO.pack(token ^ 1, 1), HELLO.pack(token, 4), HELLO.pack(token, -1), b"", b"abc"]
        for hello in [*wrong, *(source.randbytes(source.randrange(60)) for _ in range(20))]:
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(hello)
            assert arrivals(listener, 0.002) == []
        with sockets.connect(listener.address(), 1, 5.0, share=False)[0]:
            [(rank, connection, _)] = arrivals(listener)
            assert rank == 1
            connection.close()
        for stranger in strangers[:3]:
            stranger.settimeout(1)
            assert stranger.recv(1) == b"", "it is closed"
        for one in (*strangers, listener):
            one.close()
