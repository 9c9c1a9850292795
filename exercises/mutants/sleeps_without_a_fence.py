"""Two ranks of a machine both sleep, and neither wakes the other: each looks before its store is visible."""

from comm.transport.segment import _lock

TARGET = "comm.transport.segment.fence"
KILLER = (
    "tests.comm.test_memory_ends."
    "test_a_rank_makes_its_counter_visible_before_it_looks_whether_the_other_one_sleeps"
)
CAUSE = "is there a fence between"
SYMPTOM = "On some processors a small message between ranks of one machine now and then takes a second."


def mutant() -> None:
    _lock.locked()
