"""Send messages through memory that two ranks of a machine share: a ring buffer.

      sender ──copy──► ring buffer ──copy──► receiver

      | head  sleeps |          ring buffer          | tail  sleeps |
       the sender's         ..######......             the receiver's
                           tail      head

`head` and `tail` count all bytes so far, so the buffer holds head - tail of them. Each counter has one
writer. The sender copies the next piece while the receiver copies the last one out of the cache. A rank that
has nothing to do sets its `sleeps`, looks at the counters once more, and sleeps. README.md says under
"Visibility" why both ranks need memory fences for that.

The memory has no name (memfd, Linux), so nothing is left behind. Its descriptor travels over the socket of
the connection. This socket then wakes a rank that sleeps, and shows that the other rank has died.
"""

import mmap
import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Protocol

from comm.errors import CommError

# So much stays in a core's cache between the two copies: with 4 MiB an all-reduce of 1 to 16 MiB took 1.8
# to 2.8 times as long on 2 ranks of 2 cores. With 256 KiB it took 1.1 to 2 times as long on 4 ranks, and
# less on 2.
RING_BYTES = 1 << 20
_HEADER_BYTES = 128
_SIZE = _HEADER_BYTES + RING_BYTES
# Words of 8 bytes. The sender writes those of the first 64 bytes, the receiver those of the next 64: what one
# processor writes and the other reads should not be in the same line of a cache as what it reads itself.
HEAD, SENDER_SLEEPS = 0, 1
TAIL, RECEIVER_SLEEPS, NUM_TAKEN = 8, 9, 10
_WAKE = b"\1"
_lock = threading.Lock()


def is_possible() -> bool:
    """Return whether this system has memory without a name."""
    return hasattr(os, "memfd_create")


def fence() -> None:
    """Make all earlier stores of this thread visible to other processors before its later loads and stores.

    Python has no fence, but a lock is taken and given back by atomic instructions. On x86 one of them is a
    full fence. On ARM what is before the first release cannot move behind the second acquire.
    """
    with _lock:
        pass
    with _lock:
        pass


class RingBuffer:
    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)  # which keeps a descriptor of its own
        self._view = memoryview(self._memory)
        self.words = self._view[:_HEADER_BYTES].cast("Q")
        self.ring = self._view[_HEADER_BYTES:]

    def close(self) -> None:
        for view in (self.words, self.ring, self._view):
            view.release()
        self._memory.close()


def create() -> tuple[RingBuffer, int]:
    """Return a ring buffer and its descriptor, which the caller closes. Raise CommError without memory."""
    descriptor = os.memfd_create("workbook", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)  # else a full memory would end the process at the first use
        return RingBuffer(descriptor), descriptor
    except OSError as error:
        os.close(descriptor)
        raise CommError(
            f"There is not enough memory for a ring buffer of {_SIZE} bytes ({error.strerror}); "
            "free some, or use another transport."
        ) from error


class Done(Protocol):
    """An object whose `done` becomes true when its message has left or arrived."""

    done: bool


class End:
    def __init__(self, end: socket.socket, buffer: RingBuffer | None = None) -> None:
        self.socket, self._buffer = end, buffer

    def sleep(self, sleeps: bool) -> None:
        """Tell the peer whether this rank has to be woken. (The kernel does that for a socket.)"""

    def close(self) -> None:
        self.socket.close()
        if self._buffer is not None:
            self._buffer.close()


class OutEnd(End):
    """The end into which this rank sends its messages, in the order of `post`."""

    def __init__(self, end: socket.socket, buffer: RingBuffer | None = None) -> None:
        super().__init__(end, buffer)
        self._queue: deque[tuple[memoryview, Done]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    def post(self, data: memoryview, transfer: Done) -> None:
        self._queue.append((data, transfer))


class MemoryOut(OutEnd):
    def __init__(self, end: socket.socket, buffer: RingBuffer) -> None:
        super().__init__(end, buffer)
        self._words, self._ring = buffer.words, buffer.ring
        self._head = self._num_taken = 0

    def push(self) -> bool:
        """Copy messages to the ring buffer as far as they fit. Return whether any message has moved on."""
        free = RING_BYTES - (self._head - self._words[TAIL])
        if not self._queue or not free:
            return False
        while self._queue and free:
            data, transfer = self._queue.popleft()
            taken = min(free, len(data))
            write_to_ring(self._ring, self._head, data[:taken])
            self._head += taken
            free -= taken
            if taken < len(data):
                self._queue.appendleft((data[taken:], transfer))
            else:
                transfer.done = True
        fence()  # the bytes must be there before the counter says so
        self._words[HEAD] = self._head
        fence()
        if self._words[RECEIVER_SLEEPS]:
            wake(self.socket)
        return True

    def num_taken(self) -> int:
        before, self._num_taken = self._num_taken, self._words[NUM_TAKEN]
        return self._num_taken - before

    def events(self, waits_for_confirmation: bool) -> int:
        return select.POLLIN if self.is_busy or waits_for_confirmation else 0

    def sleep(self, sleeps: bool) -> None:
        self._words[SENDER_SLEEPS] = sleeps


class MemoryIn(End):
    def __init__(self, end: socket.socket, buffer: RingBuffer) -> None:
        super().__init__(end, buffer)
        self._words, self._ring = buffer.words, buffer.ring
        self._tail = 0

    def receive(self, data: memoryview) -> int:
        """Fill the beginning of `data` with the next bytes of a message. Return how many, 0 for none yet."""
        num_bytes = min(self._words[HEAD] - self._tail, len(data))
        if not num_bytes:
            return 0
        fence()  # read the bytes only after the counter
        read_from_ring(self._ring, self._tail, data[:num_bytes])
        self._tail += num_bytes
        fence()  # the bytes are read before the sender may write there again
        self._words[TAIL] = self._tail
        self._wake_sender()
        return num_bytes

    def confirm(self) -> None:
        self._words[NUM_TAKEN] += 1
        self._wake_sender()

    def _wake_sender(self) -> None:
        fence()
        if self._words[SENDER_SLEEPS]:
            wake(self.socket)

    def sleep(self, sleeps: bool) -> None:
        self._words[RECEIVER_SLEEPS] = sleeps


def write_to_ring(ring: memoryview, position: int, data: memoryview) -> None:
    """Copy bytes to a ring buffer in which they fit. `position` counts all the bytes before them."""
    start = position % RING_BYTES
    first = min(len(data), RING_BYTES - start)
    ring[start : start + first] = data[:first]
    if first < len(data):
        ring[: len(data) - first] = data[first:]


def read_from_ring(ring: memoryview, position: int, data: memoryview) -> None:
    """Fill `data` with bytes of a ring buffer. `position` counts all the bytes before them."""
    start = position % RING_BYTES
    first = min(len(data), RING_BYTES - start)
    data[:first] = ring[start : start + first]
    if first < len(data):
        data[first:] = ring[: len(data) - first]


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
