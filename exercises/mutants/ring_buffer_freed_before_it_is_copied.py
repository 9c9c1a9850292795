"""A fast sender overwrites what its receiver still copies: the space was called free too early."""

from comm.transport.segment import HEAD, RING_BYTES, TAIL

TARGET = "comm.transport.memory_ends.MemoryIn._take"
KILLER = "tests.comm.test_memory_ends.test_space_in_the_ring_buffer_is_free_only_after_its_bytes_were_copied"
CAUSE = "is used again while another rank still reads it"
SYMPTOM = "On a busy machine a rank sometimes gets a message in which a part of the next one stands."


def mutant(self, into: memoryview) -> int:
    num_bytes = min(self._words[HEAD] - self._tail, len(into))
    if not num_bytes:
        return 0
    start = self._tail % RING_BYTES
    self._tail += num_bytes
    self._words[TAIL] = self._tail
    self._wake_sender()
    first = min(num_bytes, RING_BYTES - start)
    into[:first] = self._ring[start : start + first]
    if first < num_bytes:
        into[first:num_bytes] = self._ring[: num_bytes - first]
    return num_bytes
