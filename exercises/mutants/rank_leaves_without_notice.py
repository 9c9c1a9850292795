"""A rank that finishes early is reported as dead by the others, though it ended without an error."""

TARGET = "comm.membership.liveness.finish"
KILLER = "tests.comm.test_liveness.test_all_ranks_learn_that_a_rank_has_finished"
CAUSE = "Every rank must say the same"


def mutant() -> None:
    pass  # the connection closes, as after a rank's death
