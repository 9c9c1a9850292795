"""The two ends of a ring's connection over a stream of bytes; cross_memory.py has those within a machine."""

import select
import socket
from collections import deque


class SocketOut:
    """What leaves for the right neighbour."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._leaving = memoryview(b"")

    @property
    def is_busy(self) -> bool:
        """Whether something has left in part."""
        return self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """Whether the kernel has still to take the rest of it."""
        return bool(self._leaving)

    def push(self, queue: deque[memoryview]) -> int:
        """Send what the kernel takes of the first in `queue`; returns how many bytes."""
        if not self._leaving:
            if not queue:
                return 0
            self._leaving = queue.popleft()
        try:
            sent = self.socket.send(self._leaving)
        except BlockingIOError:
            return 0
        self._leaving = self._leaving[sent:]
        return sent

    def waits_for(self) -> int:
        """What select.poll is to look for."""
        return select.POLLOUT if self._leaving else 0


class SocketIn:
    """What comes from the left neighbour."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self._wakes_at = end, 1

    def receive(self, into: memoryview) -> int:
        """Fill the beginning of `into`; returns how many bytes, 0 when nothing is there yet."""
        try:
            received = self.socket.recv_into(into)
        except BlockingIOError:
            return 0
        if not received:
            raise ConnectionError("hung up")
        return received

    def waits_for(self, num_bytes: int) -> int:
        """What select.poll is to look for. The kernel wakes us when so much is here, not for each packet."""
        if num_bytes != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes
        return select.POLLIN
