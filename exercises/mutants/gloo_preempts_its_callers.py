"""A small all-reduce takes milliseconds where ranks share cores: gloo preempts the thread that calls it."""

TARGET = "comm.rendezvous.keep_from_preempting"
KILLER = "tests.lab.test_gloo_threads.test_it_gives_way_in_ranks_that_join_over_a_store_too"


def mutant() -> None:
    pass
