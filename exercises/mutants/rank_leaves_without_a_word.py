"""One rank has fewer batches and ends well, and the others say that it has died: its log shows no error."""

TARGET = "comm.membership.liveness.finish"
KILLER = "tests.comm.test_liveness.test_all_ranks_learn_that_a_rank_has_finished"


def mutant() -> None:
    pass  # its connection closes, as if it had died
