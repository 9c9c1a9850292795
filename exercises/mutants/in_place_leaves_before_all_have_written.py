"""A rank returns when its own chunk is reduced, while others still write theirs to its tensor."""

from comm.transport.wire import Wire

TARGET = "comm.algorithms.in_place._wait_for_all"
KILLER = "tests.comm.test_in_place.test_a_rank_returns_only_when_all_ranks_have_written_their_chunk"
CAUSE = "wait until the others have finished with it"
SYMPTOM = "Now and then a part of the gradient is that of one rank alone, and only on busy machines."


def mutant(wire: Wire) -> None:
    pass
