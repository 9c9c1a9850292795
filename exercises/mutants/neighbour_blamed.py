"""A rank dies, and each survivor blames its own neighbour: the one whose connection it has lost."""

from comm.membership.liveness import Gone

TARGET = "comm.membership.liveness.cause"
KILLER = "tests.comm.test_liveness.test_all_survivors_name_the_rank_that_died_and_not_their_own_neighbour"


def mutant(patience: float = 0.0) -> Gone | None:
    return None  # what a rank's own connections show is all it knows
