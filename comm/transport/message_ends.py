"""Send and receive messages of two ranks through shared memory; a send is done when its receiver has it.

      small message   frame (bytes, 0) and the message, in the ring buffer       copied twice
      large message   frame (bytes, address): the receiver reads it there        copied once

It differs from memory_ends.py, which carries the messages of collectives, in two points. A frame says how
large the message is, so that a receiver which expects another size can refuse it. And the receiver moves its
counter TAIL past a message only when it has all of it, and so the sender knows that its `send` is done.

A sender that computes after `isend` moves nothing. So as much as possible needs no help from it: a small
message for which the ring buffer has too little space is read from its memory, as a large one is. Only if the
ring buffer is full of frames, or if the receiver may not read the sender's memory, does something stay in the
sender's queue. Then HAS_MORE tells the receiver to knock at the sender's door (mailbox.py).
"""

import select
import socket
import struct
from collections import deque

import torch

from comm.transport import cross_memory
from comm.transport.memory_ends import PIECE_BYTES, drain, read_from_ring, wake, write_to_ring
from comm.transport.segment import (
    HAS_MORE,
    HEAD,
    NO,
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
from comm.transport.stream_wire import bytes_of
from comm.transport.wire import Transfer

LARGE_BYTES = 1 << 15  # from here on the receiver reads messages from the sender's memory
_FRAME = struct.Struct("=qq")  # number of bytes, address (0 if the message follows)
_ALIGNED = _FRAME.size  # where frames begin, so that none goes over the end of the ring buffer


class Message:
    """A tensor on its way. `done` becomes true when its receiver has it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.num_bytes: int = tensor.nbytes
        self.sent_bytes = self.num_bytes  # how many bytes the sender has sent
        self.done = not self.num_bytes  # an empty tensor is not sent
        self.by_gloo: Transfer | None = None  # if the two ranks turn out not to share memory

    @property
    def is_settled(self) -> bool:
        """Return whether the mailbox has nothing more to do for it."""
        return self.done or self.by_gloo is not None


class Outbox:
    """The end into which this rank sends the messages of `queue`, in their order."""

    def __init__(self, end: socket.socket, segment: Segment, queue: deque[Message]) -> None:
        self.socket, self._segment, self._queue = end, segment, queue
        self._words, self._ring = segment.words, segment.ring
        self._head = 0
        self._rest: memoryview | None = None  # of the first message, if its beginning has left
        self._untaken: deque[tuple[int, Message]] = deque()  # with the TAIL that shows that it was taken

    @property
    def is_busy(self) -> bool:
        """Return whether the receiver has not taken all messages yet."""
        return bool(self._queue or self._untaken)

    def push(self) -> bool:
        """Hand over messages as far as they fit. Return whether any message has moved on."""
        words, before, moved = self._words, self._head, False
        while True:
            tail = words[TAIL]
            while self._untaken and self._untaken[0][0] <= tail:
                self._untaken.popleft()[1].done = moved = True
            while self._queue and self._put(RING_BYTES - (self._head - tail)):
                pass
            if not self._queue or self._is_stuck(tail):
                break
        if words[HAS_MORE] and not self._queue:
            words[HAS_MORE] = 0
        if self._head == before:
            return moved
        fence()  # the bytes must be there before the counter says so
        words[HEAD] = self._head
        fence()
        if words[RECEIVER_SLEEPS]:
            wake(self.socket)
        return True

    def _is_stuck(self, tail: int) -> bool:
        """Tell the receiver that there is more. Return False if it has made space meanwhile."""
        words, reads = self._words, self._words[READS_MEMORY]
        fence()
        words[HAS_MORE], words[HEAD] = 1, self._head
        fence()
        return words[TAIL] == tail and words[READS_MEMORY] == reads

    def _put(self, free: int) -> bool:
        """Write the first message, or a part of it. Return whether it has left completely."""
        message = self._queue[0]
        if self._rest is None:
            num_bytes, reads = message.num_bytes, self._words[READS_MEMORY]
            too_large = num_bytes >= LARGE_BYTES or free < _FRAME.size + num_bytes
            if free < _FRAME.size or (too_large and reads == UNKNOWN):
                return False
            by_address = too_large and reads == YES
            address = message.tensor.data_ptr() if by_address else 0
            _FRAME.pack_into(self._ring, self._head % RING_BYTES, num_bytes, address)
            self._head, free = self._head + _FRAME.size, free - _FRAME.size
            self._rest = memoryview(b"") if by_address else bytes_of(message.tensor)
        self._rest = self._write(self._rest, free)
        if self._rest:
            return False
        self._rest, self._head = None, _aligned(self._head)
        self._untaken.append((self._head, self._queue.popleft()))
        return True

    def _write(self, data: memoryview, free: int) -> memoryview:
        """Write as much of the message as there is space for. Return the rest."""
        num_bytes = min(free, len(data))
        write_to_ring(self._ring, self._head, data[:num_bytes])
        self._head += num_bytes
        return data[num_bytes:]

    def is_untaken(self) -> bool:
        """Return whether the receiver has not taken all messages, and no thread of it has been woken."""
        return self.is_busy and not self._words[RECEIVER_SLEEPS]

    def sleep(self, sleeps: bool) -> None:
        """Tell the receiver whether a thread of this rank has to be woken when it takes a message."""
        self._words[SENDER_SLEEPS] = sleeps and self.is_busy

    def is_open(self) -> bool:
        """Take the bytes that have woken this rank. Return whether the connection is open."""
        return drain(self.socket)

    def close(self) -> None:
        """Close the connection, and free its memory."""
        self.socket.close()
        self._segment.close()


class Inbox:
    """The end from which this rank fills the tensors of `posted`, in their order.

    `pid` is the sender's process, or 0 if this rank may not read its memory.
    """

    def __init__(self, end: socket.socket, segment: Segment, pid: int, posted: deque[Message]) -> None:
        self.socket, self._segment, self._pid, self._posted = end, segment, pid, posted
        self._hangup = select.poll()
        self._hangup.register(end, select.POLLRDHUP)
        self._words, self._ring = segment.words, segment.ring
        self._tail = 0
        self._size, self._address, self._filled = -1, 0, 0  # of the message that is being read
        self._words[READS_MEMORY] = YES if pid else NO

    @property
    def is_busy(self) -> bool:
        """Return whether a receive is posted."""
        return bool(self._posted)

    def pull(self) -> bool:
        """Take the next piece of a message. Return whether there was one.

        Raise OSError if the sender has gone.
        """
        if not self._posted:
            return False
        message, words = self._posted[0], self._words
        if self._size < 0:
            if words[HEAD] == self._tail:
                return False
            fence()  # read the frame only after the counter
            self._size, self._address = _FRAME.unpack_from(self._ring, self._tail % RING_BYTES)
            self._tail += _FRAME.size
            self._filled = 0
        fits = self._size == message.num_bytes
        if self._address:
            self._filled = self._read_memory(message.tensor) if fits else self._size
        else:
            num_bytes = min(words[HEAD] - self._tail, self._size - self._filled)
            if not num_bytes:
                return False
            fence()
            if fits:
                into = bytes_of(message.tensor)[self._filled : self._filled + num_bytes]
                read_from_ring(self._ring, self._tail, into)
            self._tail, self._filled = self._tail + num_bytes, self._filled + num_bytes
        if self._filled == self._size:
            self._posted.popleft()
            self._tail = _aligned(self._tail)
            message.sent_bytes, message.done, self._size = self._size, True, -1
        elif self._address:
            return True  # the sender must not believe that it was taken
        fence()  # the bytes are read before the sender may write there again
        words[TAIL] = self._tail
        fence()
        if words[SENDER_SLEEPS]:
            wake(self.socket)
        return True

    def _read_memory(self, tensor: torch.Tensor) -> int:
        """Read the next piece out of the sender's memory. Return how many bytes have been read so far."""
        into = bytes_of(tensor)[self._filled : self._filled + PIECE_BYTES]
        num_bytes = cross_memory.read_memory(self._pid, self._address + self._filled, into)
        if self.socket.fileno() < 0 or self._hangup.poll(0):
            # A sender that gives up closes the connection before it uses its memory for something else.
            raise ConnectionError("it closed the connection")
        return self._filled + num_bytes

    def is_wanting(self) -> bool:
        """Return whether a receive is posted for which the sender has more in its queue, and is not woken."""
        return self.is_busy and bool(self._words[HAS_MORE]) and not self._words[SENDER_SLEEPS]

    def sleep(self, sleeps: bool) -> None:
        """Tell the sender whether a thread of this rank has to be woken when it sends."""
        self._words[RECEIVER_SLEEPS] = sleeps and self.is_busy

    def is_open(self) -> bool:
        """Take the bytes that have woken this rank. Return whether the connection is open."""
        return drain(self.socket)

    def close(self) -> None:
        """Close the connection, and free its memory."""
        self.socket.close()
        self._segment.close()


def process_of(end: socket.socket, segment: Segment, nonce_address: int) -> int:
    """Return the process at the other end of a new connection, or 0 if this rank may not read its memory."""
    pid = cross_memory.peer_of(end)
    return pid if cross_memory.can_read(pid, nonce_address, segment.nonce) else 0


def _aligned(position: int) -> int:
    return -(-position // _ALIGNED) * _ALIGNED
