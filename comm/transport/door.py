"""Let the ranks of a machine connect to this rank, and knock when they want it to look at its messages.

A knock is a datagram to a second Unix socket. A thread (mailbox.py) answers the door, so a rank that computes
need not look for connections or knocks.
"""

import hashlib
import select
import socket
from contextlib import suppress

from comm.transport.listener import Arrival, Listener


class Door:
    """The Unix sockets to which other ranks connect, and on which they knock. They need its `token`."""

    def __init__(self, size: int) -> None:
        self._listener = Listener(size, tcp=False)
        *_, self.token = self._listener.address()
        self._knocker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._knocker.bind(_name(self.token))
        self._knocker.setblocking(False)

    def answer(self) -> list[Arrival]:
        """Wait until a rank knocks or connects. Return the new connections."""
        something = select.poll()
        for end in (self._knocker, *self._listener.sockets()):
            something.register(end, select.POLLIN)
        something.poll(1000 if self._listener.has_strangers() else None)
        with suppress(BlockingIOError):
            while True:
                self._knocker.recv(1)
        return self._listener.accept()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self._knocker.close()


def knock(token: int) -> None:
    """Knock at the door with this token. It does no harm if the rank has gone or other knocks are waiting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end, suppress(OSError):
        end.setblocking(False)
        end.sendto(b"\1", _name(token))


def _name(token: int) -> str:
    """Return the abstract name of the socket. It does not show the token, because all processes see names."""
    return f"\0workbook-knock-{hashlib.sha256(f'knock {token}'.encode()).hexdigest()[:16]}"
