"""Send to a ring neighbour and receive from one over a socket. (cross_memory.py reads memory instead.)"""

import select
import socket
from collections import deque


class SocketOut:
    """Send to the right neighbour."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._leaving = memoryview(b"")

    @property
    def is_busy(self) -> bool:
        """Return whether a message has not left completely."""
        return self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """Return whether the kernel has not taken all of a message yet."""
        return bool(self._leaving)

    def push(self, queue: deque[memoryview]) -> int:
        """Send as much of the first message in `queue` as the kernel takes; return the number of bytes."""
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
        """Return the events for which select.poll should wait."""
        return select.POLLOUT if self._leaving else 0


class SocketIn:
    """Receive from the left neighbour."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self._wakes_at = end, 1

    def receive(self, into: memoryview) -> int:
        """Fill the beginning of `into`; return the number of bytes, 0 if none has arrived."""
        try:
            received = self.socket.recv_into(into)
        except BlockingIOError:
            return 0
        if not received:
            raise ConnectionError("it closed the connection")
        return received

    def waits_for(self, num_bytes: int) -> int:
        """Return the events for select.poll, and let it wake up only when `num_bytes` have arrived."""
        if num_bytes != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes
        return select.POLLIN
