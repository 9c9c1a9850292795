"""A tensor arrives half changed: its sender may use it again as soon as the receiver begins to read it."""

from comm.transport import cross_memory
from comm.transport.memory_ends import _ADDRESS_BYTES, PIECE_BYTES
from comm.transport.segment import HEAD, NUM_READ

TARGET = "comm.transport.memory_ends.MemoryIn._read_memory"
KILLER = (
    "tests.comm.test_memory_ends."
    "test_a_sender_gets_its_memory_back_only_after_the_receiver_has_read_all_of_it"
)
CAUSE = "is used again while another rank still reads it"
SYMPTOM = "A large tensor sometimes arrives with an end that its sender wrote only after the send had ended."


def mutant(self, into: memoryview, message_bytes: int) -> int:
    if not self._left:
        if self._words[HEAD] - self._tail < _ADDRESS_BYTES:
            return 0
        address = bytearray(_ADDRESS_BYTES)
        self._take(memoryview(address))
        self._address, self._left = int.from_bytes(address, "little"), message_bytes
        self._words[NUM_READ] += 1
        self._wake_sender()
    num_bytes = cross_memory.read_memory(self._pid, self._address, into[: min(PIECE_BYTES, self._left)])
    if self._hangup.poll(0):
        raise ConnectionError("it closed the connection")
    self._address, self._left = self._address + num_bytes, self._left - num_bytes
    return num_bytes
