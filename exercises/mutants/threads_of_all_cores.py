"""Ranks started by hand take twice as long for a step: each rank uses threads on all cores."""

TARGET = "lab.launch.threads.share_cores"
KILLER = "tests.comm.test_threads.test_ranks_started_by_hand_share_the_cores_of_their_machine"


def mutant(num_ranks: int) -> None:
    pass
