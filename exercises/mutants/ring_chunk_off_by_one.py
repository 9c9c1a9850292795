"""All-reduced gradients are wrong and differ by rank: the loss is noise, and replicas drift apart."""

TARGET = "comm.algorithms.pipelined_ring.chunk_sent"
KILLER = "tests.comm.test_collectives_by_hand.test_a_ring_all_reduce_adds_up_all_ranks_in_every_chunk"
CAUSE = "count chunks alike"


def mutant(rank: int, step: int, n: int) -> int:
    return (rank - step) % n
