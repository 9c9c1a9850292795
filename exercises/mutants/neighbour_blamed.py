"""When a rank dies, each survivor names its own neighbour instead of the rank that died."""

from comm.membership.liveness import Departure

TARGET = "comm.membership.liveness.cause"
KILLER = "tests.comm.test_liveness.test_all_survivors_name_the_rank_that_died_and_not_their_own_neighbour"
CAUSE = "Every rank must say the same"


def mutant(patience: float = 0.0) -> Departure | None:
    return None  # no other rank is asked who died
