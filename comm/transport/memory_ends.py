"""Send and receive messages through shared memory, or by reading the sender's memory.

      small message   sender ──copy──► ring buffer ──copy──► receiver
      large message   sender: "it lies at this address" ──► receiver reads it there, and counts it as read

Two copies need not take longer than one: the sender copies the next piece while the receiver copies the last
one out of the cache, each on its own core. A large message is copied only once, so the sender's core is free:
the receiver reads the sender's memory by cross-memory attach (cross_memory.py), as in MPI (Vienne,
"Benefits of Cross Memory Attach for MPI libraries on HPC Clusters", 2014). The sender must not change it
before it is read. Where the kernel refuses, a large message goes through the ring buffer in pieces.

The socket of the connection carries no messages. It wakes a rank that sleeps, and it shows that the other
rank has died.
"""

import select
import socket
from collections import deque
from contextlib import suppress

from comm.transport import cross_memory
from comm.transport.segment import (
    HEAD,
    NO,
    NUM_READ,
    NUM_TAKEN,
    READS_MEMORY,
    RECEIVER_SLEEPS,
    RING_BYTES,
    SENDER_SLEEPS,
    TAIL,
    UNKNOWN,
    YES,
    Segment,
    fence,
)
from comm.transport.sockets import Done

LARGE_BYTES = 8 << 20  # from here on messages are read from the sender's memory
PIECE_BYTES = 1 << 18  # how much is read at once: it stays in the cache until it is used
_ADDRESS_BYTES = 8
_WAKE = b"\1"


class MemoryOut:
    """The end into which this rank sends its messages, in the order of `post`."""

    def __init__(self, end: socket.socket, segment: Segment, large_bytes: int | None = None) -> None:
        self.socket, self._segment, self._large_bytes = end, segment, large_bytes or LARGE_BYTES
        self._words, self._ring = segment.words, segment.ring
        self._head = 0
        self._queue: deque[tuple[memoryview, Done]] = deque()
        self._unread: deque[tuple[memoryview, Done]] = deque()
        self._num_read = self._num_taken = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a message has not left completely, or was not read yet."""
        return bool(self._queue or self._unread)

    def post(self, data: memoryview, transfer: Done) -> None:
        """Queue a message. `transfer.done` becomes true when its memory may be changed."""
        self._queue.append((data, transfer))

    def push(self) -> bool:
        """Copy messages to the ring buffer as far as they fit. Return whether any message has moved on."""
        words, before = self._words, self._head
        num_read = words[NUM_READ]
        moved = self._num_read < num_read
        while self._num_read < num_read:
            self._unread.popleft()[1].done = True
            self._num_read += 1
        free = RING_BYTES - (self._head - words[TAIL])
        while self._queue and free:
            data, transfer = self._queue[0]
            if len(data) >= self._large_bytes and words[READS_MEMORY] != NO:
                if words[READS_MEMORY] == UNKNOWN or free < _ADDRESS_BYTES:
                    break
                self._write(memoryview(cross_memory.address_of(data).to_bytes(_ADDRESS_BYTES, "little")))
                free -= _ADDRESS_BYTES
                self._unread.append(self._queue.popleft())
                continue
            taken = min(free, len(data))
            self._write(data[:taken])
            free -= taken
            if taken < len(data):
                self._queue[0] = data[taken:], transfer
            else:
                self._queue.popleft()
                transfer.done = True
        if self._head == before:
            return moved
        fence()  # the bytes must be there before the counter says so
        words[HEAD] = self._head
        fence()
        if words[RECEIVER_SLEEPS]:
            wake(self.socket)
        return True

    def _write(self, data: memoryview) -> None:
        """Copy bytes to the ring buffer, behind the last ones. They fit."""
        write_to_ring(self._ring, self._head, data)
        self._head += len(data)

    def num_taken(self) -> int:
        """Return how many messages the receiver has confirmed since the last call."""
        before, self._num_taken = self._num_taken, self._words[NUM_TAKEN]
        return self._num_taken - before

    def events(self, waits_for_confirmation: bool) -> int:
        """Return the events for which select.poll should wait."""
        return select.POLLIN if self.is_busy or waits_for_confirmation else 0

    def sleep(self, sleeps: bool) -> None:
        """Tell the receiver whether this rank has to be woken."""
        self._words[SENDER_SLEEPS] = sleeps

    def close(self) -> None:
        """Close the connection, and free its memory."""
        self.socket.close()
        self._segment.close()


class MemoryIn:
    """The end from which this rank receives the messages of a peer whose process is `pid`."""

    def __init__(
        self, end: socket.socket, segment: Segment, pid: int, large_bytes: int | None = None
    ) -> None:
        self.socket, self._segment, self._pid = end, segment, pid
        self._large_bytes = large_bytes or LARGE_BYTES
        self._hangup = select.poll()
        self._hangup.register(end, select.POLLRDHUP)
        self._words, self._ring = segment.words, segment.ring
        self._tail = 0
        self._address = self._left = 0  # of a large message: where its rest lies, and how much that is
        self._words[READS_MEMORY] = YES if pid else NO
        wake(end)

    def receive(self, into: memoryview, message_bytes: int) -> int:
        """Fill the beginning of `into` with the next bytes of a message. Return how many, 0 for none yet.

        Raise OSError if the sender has gone.
        """
        if self._left or (message_bytes >= self._large_bytes and self._pid):
            return self._read_memory(into, message_bytes)
        return self._take(into)

    def _take(self, into: memoryview) -> int:
        """Take bytes out of the ring buffer."""
        num_bytes = min(self._words[HEAD] - self._tail, len(into))
        if not num_bytes:
            return 0
        fence()  # read the bytes only after the counter
        read_from_ring(self._ring, self._tail, into[:num_bytes])
        self._tail += num_bytes
        fence()  # the bytes are read before the sender may write there again
        self._words[TAIL] = self._tail
        self._wake_sender()
        return num_bytes

    def _read_memory(self, into: memoryview, message_bytes: int) -> int:
        """Copy a piece of a large message out of the sender's memory. The sender waits for the last one."""
        if not self._left:
            if self._words[HEAD] - self._tail < _ADDRESS_BYTES:
                return 0
            address = bytearray(_ADDRESS_BYTES)
            self._take(memoryview(address))
            self._address, self._left = int.from_bytes(address, "little"), message_bytes
        num_bytes = cross_memory.read_memory(self._pid, self._address, into[: min(PIECE_BYTES, self._left)])
        if self._hangup.poll(0):
            # A sender that gives up closes the connection before it uses its memory for something else.
            raise ConnectionError("it closed the connection")
        self._address, self._left = self._address + num_bytes, self._left - num_bytes
        if not self._left:
            self._words[NUM_READ] += 1
            self._wake_sender()
        return num_bytes

    def confirm(self) -> None:
        """Tell the sender that a message was taken."""
        self._words[NUM_TAKEN] += 1
        self._wake_sender()

    def _wake_sender(self) -> None:
        fence()
        if self._words[SENDER_SLEEPS]:
            wake(self.socket)

    def sleep(self, sleeps: bool) -> None:
        """Tell the sender whether this rank has to be woken."""
        self._words[RECEIVER_SLEEPS] = sleeps

    def close(self) -> None:
        """Close the connection, and free its memory."""
        self.socket.close()
        self._segment.close()


def write_to_ring(ring: memoryview, position: int, data: memoryview) -> None:
    """Copy bytes to a ring buffer in which they fit. `position` counts all the bytes before them."""
    start = position % RING_BYTES
    first = min(len(data), RING_BYTES - start)
    ring[start : start + first] = data[:first]
    if first < len(data):
        ring[: len(data) - first] = data[first:]


def read_from_ring(ring: memoryview, position: int, into: memoryview) -> None:
    """Fill `into` with bytes of a ring buffer. `position` counts all the bytes before them."""
    start = position % RING_BYTES
    first = min(len(into), RING_BYTES - start)
    into[:first] = ring[start : start + first]
    if first < len(into):
        into[first:] = ring[: len(into) - first]


def wake(end: socket.socket) -> None:
    """Wake the rank at the other end, which sleeps until its end of the connection has something to read."""
    with suppress(OSError):  # the socket is full of bytes that wake it, or the rank has gone
        end.send(_WAKE)


def drain(end: socket.socket) -> bool:
    """Take the bytes that have woken this rank. Return whether the connection is open."""
    try:
        return bool(end.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
