"""Sometimes replicas differ after one step: in that step MKL chose its code in two threads at once."""

TARGET = "lab.launch.threads.choose_vector_math"
KILLER = (
    "tests.comm.test_threads."
    "test_a_rank_calls_the_functions_of_an_optimizer_once_in_one_thread_before_its_first_step"
)


def mutant() -> None:
    pass
