"""Some messages between ranks of one machine are wrong from a byte on: a ring buffer lacks its last byte."""

from comm.transport.segment import RING_BYTES

TARGET = "comm.transport.memory_ends.write_to_ring"
KILLER = (
    "tests.comm.test_memory_ends."
    "test_a_message_that_goes_over_the_end_of_the_ring_buffer_goes_on_at_its_beginning"
)
CAUSE = "fit before the end"
SYMPTOM = "Now and then a message between ranks of one machine is wrong from some byte on."


def mutant(ring: memoryview, position: int, data: memoryview) -> None:
    start = position % RING_BYTES
    first = min(len(data), RING_BYTES - 1 - start)
    ring[start : start + first] = data[:first]
    if first < len(data):
        ring[: len(data) - first] = data[first:]
