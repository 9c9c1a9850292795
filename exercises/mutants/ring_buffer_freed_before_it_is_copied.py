"""A fast sender overwrites what its receiver still copies: the space was called free too early."""

from comm.transport.memory_ends import read_from_ring
from comm.transport.segment import HEAD, TAIL

TARGET = "comm.transport.memory_ends.MemoryIn._take"
KILLER = "tests.comm.test_memory_ends.test_space_in_the_ring_buffer_is_free_only_after_its_bytes_were_copied"
CAUSE = "is used again while another rank still reads it"
SYMPTOM = "On a busy machine a rank sometimes gets a message in which a part of the next one stands."


def mutant(self, into: memoryview) -> int:
    num_bytes = min(self._words[HEAD] - self._tail, len(into))
    if not num_bytes:
        return 0
    taken = self._tail
    self._tail += num_bytes
    self._words[TAIL] = self._tail
    self._wake_sender()
    read_from_ring(self._ring, taken, into[:num_bytes])
    return num_bytes
