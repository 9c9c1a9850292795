"""A ring buffer in shared memory. Write `MemoryOut._write` and `MemoryIn._take` of
comm/transport/memory_ends.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/transport/memory_ends.py yet: it contains
the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    fence() -> None
        Make all earlier stores of this thread visible to other processors before its later loads and
        stores.
    HEAD, SENDER_SLEEPS, HAS_MORE = (0, 1, 2)
    RING_BYTES = 1 << 18
    self._head
    self._ring
    self._tail
    self._wake_sender() -> None
    self._words
    TAIL, RECEIVER_SLEEPS, NUM_READ, READS_MEMORY = (8, 9, 10, 11)

Check it with `python -m exercises check ring_buffer`.
"""

from comm.transport.segment import HEAD, RING_BYTES, TAIL, fence


def _write(self, data: memoryview) -> None:
    """Copy `data` to the ring buffer, behind what was written last, and count its bytes in `self._head`.

    `self._ring` is the memory, of RING_BYTES bytes. `self._head` is the number of all bytes that were
    ever written, so byte k of the stream lies at position k modulo RING_BYTES. The caller has made
    sure that there is space. It publishes `self._head` afterwards, and only then the receiver looks
    at the bytes.
    """
    raise NotImplementedError(
        "A ring buffer in shared memory is not written yet: `MemoryOut._write` has no body."
    )


def _take(self, into: memoryview) -> int:
    """Fill the beginning of `into` with bytes out of the ring buffer. Return how many, 0 for none.

    `self._tail` is the number of all bytes that were ever taken, and `self._words[HEAD]` that of
    all bytes that were written. Take no more than there are, and no more than fit into `into`.
    Publish the new tail in `self._words[TAIL]`: from then on the sender writes into that space.
    Then call `self._wake_sender()`, which makes the counter visible, and wakes the sender if it
    sleeps. If there are no bytes, do nothing.
    """
    raise NotImplementedError(
        "A ring buffer in shared memory is not written yet: `MemoryIn._take` has no body."
    )
