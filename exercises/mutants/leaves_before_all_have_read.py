"""After a mismatch one rank names it and leaves, and a slower rank reports only a lost connection."""

from comm.transport.wire import Wire

TARGET = "comm.transport.handshake.wait_until_all_have_read"
KILLER = (
    "tests.comm.test_leaving.test_a_late_rank_raises_the_same_mismatch_though_the_others_have_read_its_header"
)
CAUSE = "Every rank must say the same"
SYMPTOM = "After a mismatch one rank names it, and a slower rank reports only a lost connection."


def mutant(wire: Wire) -> None:
    pass
