"""Send a queue of messages into a socket, and receive messages from one, without blocking."""

import select
import socket
from collections import deque
from contextlib import suppress
from typing import Protocol

_MOST_AT_ONCE = 8  # messages that one call gives to the kernel


class Done(Protocol):
    """An object whose `done` becomes true when its message has left or arrived."""

    done: bool


class StreamOut:
    """The end of a connection into which this rank sends its messages, in the order of `post`."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._queue: deque[tuple[memoryview, Done]] = deque()

    @property
    def is_busy(self) -> bool:
        """Return whether a message has not left completely."""
        return bool(self._queue)

    def post(self, data: memoryview, transfer: Done) -> None:
        """Queue a message. `transfer.done` becomes true when the kernel has taken its last byte."""
        self._queue.append((data, transfer))

    def push(self) -> bool:
        """Give the kernel as much as it takes. Return whether it has taken anything. Raise OSError."""
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
        """Return how many messages the receiver has confirmed since the last call. Raise OSError."""
        try:
            confirmed = len(self.socket.recv(4096))
        except BlockingIOError:
            return 0
        if not confirmed:
            raise ConnectionError("it closed the connection")
        return confirmed

    def events(self, waits_for_confirmation: bool) -> int:
        """Return the events for which select.poll should wait."""
        return (select.POLLOUT if self._queue else 0) | (select.POLLIN if waits_for_confirmation else 0)

    def sleep(self, sleeps: bool) -> None:
        """Do nothing: the kernel wakes this rank."""

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class StreamIn:
    """The end of a connection from which this rank receives the messages of a peer."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._unconfirmed = 0

    def receive(self, into: memoryview, message_bytes: int) -> int:
        """Fill the beginning of `into` with the next bytes of a message. Return how many, 0 for none yet.

        Raise OSError if the sender has gone.
        """
        try:
            received = self.socket.recv_into(into)
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

    def sleep(self, sleeps: bool) -> None:
        """Do nothing: the kernel wakes this rank."""

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
