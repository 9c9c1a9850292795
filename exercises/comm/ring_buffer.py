"""A ring buffer in shared memory. Write `write_to_ring`, `read_from_ring` and `MemoryIn._take` of
comm/transport/memory_ends.py.

Read notebooks/03_cost_of_a_message.ipynb first. Then read comm/transport/README.md: the notebook does not
tell of this. Do not open comm/transport/memory_ends.py yet: it contains the solution. All that you need is
in this file, on that page and in the hints.

You may use:

    fence() -> None
        Make all earlier stores of this thread visible to other processors before its later loads and
        stores.
    HEAD = 0
    RING_BYTES = 1 << 20
    self._ring
    self._tail
    self._wake_sender() -> None
    self._words
    TAIL = 8

Check it with `python -m exercises check ring_buffer`.
"""

from comm.transport.segment import HEAD, RING_BYTES, TAIL, fence


def write_to_ring(ring: memoryview, position: int, data: memoryview) -> None:
    """Copy `data` to the ring buffer `ring`, of RING_BYTES bytes, behind what was written last.

    `position` is the number of all bytes that were ever written before, and byte k of the stream lies
    at position k modulo RING_BYTES. The caller has made sure that there is space. It counts the bytes
    and publishes the count afterwards, with the fences that this takes, and only then the receiver
    looks at them.
    """
    raise NotImplementedError(
        "A ring buffer in shared memory is not written yet: `write_to_ring` has no body."
    )


def read_from_ring(ring: memoryview, position: int, into: memoryview) -> None:
    """Fill `into` with the bytes of the ring buffer that were written from `position` on.

    The caller has made sure that they are there.
    """
    raise NotImplementedError(
        "A ring buffer in shared memory is not written yet: `read_from_ring` has no body."
    )


def _take(self, into: memoryview) -> int:
    """Fill the beginning of `into` with bytes out of the ring buffer. Return how many, 0 for none.

    `read_from_ring` copies them out of `self._ring`, the memory of the ring buffer. `self._tail`
    is the number of all bytes that were ever taken, and `self._words[HEAD]` that of all bytes
    that were written. Take no more than there are, and no more than fit into `into`. If there are
    none, return 0 and do nothing else. Publish the new tail in `self._words[TAIL]`: from then on
    the sender writes into that space. Then call `self._wake_sender()`, which makes the counter
    visible, and wakes the sender if it sleeps.

    Call `fence()` after you have read HEAD and before you read the bytes, and again after the
    copy and before you store TAIL: otherwise a processor may show the sender the new tail while
    bytes are still being read.
    """
    raise NotImplementedError(
        "A ring buffer in shared memory is not written yet: `MemoryIn._take` has no body."
    )
