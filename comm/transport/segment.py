"""Share memory between two ranks of a machine: a ring buffer that the sender fills and the receiver empties.

      | head  sleeps |          ring buffer          | tail  sleeps |
       the sender's         ..######......             the receiver's
                           tail      head

`head` and `tail` count all bytes so far, so the buffer holds head - tail of them. Each counter has one
writer.

A rank that has nothing to do sets its `sleeps`, looks at the counters once more, and sleeps. The other one
moves its counter, looks at `sleeps`, and wakes the sleeper. Between the store and the look each of them needs
a memory fence: a processor may load before its own earlier store is visible to others. Then each would miss
what the other has done, and both would sleep.

The memory has no name (memfd, Linux). Its descriptor travels over the connection of the two ranks. So nothing
is left behind when they end, and another program cannot have made a segment of the same name.
"""

import ctypes
import mmap
import os
import secrets
import sys
import threading

from comm.errors import CommError

if sys.platform == "linux":
    import fcntl

RING_BYTES = 1 << 20  # so much stays in a core's cache between the two copies
_HEADER_BYTES = 128
_SIZE = _HEADER_BYTES + RING_BYTES
_NONCE = slice(48, 64)
# Words of 8 bytes. The sender writes those of the first 64 bytes, the receiver those of the next 64: what one
# processor writes and the other reads should not be in the same line of a cache as what it reads itself.
HEAD, SENDER_SLEEPS = 0, 1
TAIL, RECEIVER_SLEEPS, NUM_READ, READS_MEMORY, NUM_TAKEN = 8, 9, 10, 11, 12
UNKNOWN, YES, NO = 0, 1, 2  # values of READS_MEMORY: whether the receiver reads the sender's memory
_lock = threading.Lock()


def is_possible() -> bool:
    """Return whether this system has memory without a name, which can be shared."""
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


class Segment:
    """A segment that is mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)  # which keeps a descriptor of its own
        self._view = memoryview(self._memory)
        self.words = self._view[:_HEADER_BYTES].cast("Q")
        self.ring = self._view[_HEADER_BYTES:]
        self.nonce = self._view[_NONCE]
        self.nonce_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _NONCE.start

    def close(self) -> None:
        """Free the memory. It lives on in the other rank until that one closes it too."""
        for view in (self.words, self.ring, self.nonce, self._view):
            view.release()
        self._memory.close()


def create() -> tuple[Segment, int]:
    """Make a segment whose size cannot change. Return it and its descriptor, which the caller closes.

    Raise CommError if the system has not enough memory for it.
    """
    descriptor = os.memfd_create("workbook", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)  # else a full memory would end the process at the first use
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        segment = Segment(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise CommError(
            f"There is not enough memory for a shared segment of {_SIZE} bytes ({error.strerror}); "
            "free some, or use another transport."
        ) from error
    segment.nonce[:] = secrets.token_bytes(len(segment.nonce))
    return segment, descriptor


def attach(descriptor: int) -> Segment:
    """Map a segment that another rank has made, and close the descriptor. Raise OSError if it is not one."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        # Without the seal its maker could shorten it while it is in use, and this process would end.
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size != _SIZE:
            raise OSError("this is not a segment of the workbook")
        return Segment(descriptor)
    finally:
        os.close(descriptor)
