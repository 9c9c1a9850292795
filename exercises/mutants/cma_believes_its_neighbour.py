"""A peer can make a rank read any process's memory: the rank does not look for the nonce there."""

TARGET = "comm.transport.cross_memory.can_read"
KILLER = "tests.comm.test_cross_memory.test_a_process_is_read_only_if_it_shows_the_segment_that_both_share"


def mutant(pid: int, nonce_address: int, nonce: memoryview) -> bool:
    return pid > 0
