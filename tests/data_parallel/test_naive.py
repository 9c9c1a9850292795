from lab.cluster import Cluster
from lab.ranks import run_ranks
from tests.data_parallel.equivalence import trace_of_a_step


def test_naive_sends_each_gradient_and_the_flags_after_the_backward():
    def work(cluster: Cluster) -> None:
        events = trace_of_a_step("naive")
        (backward,) = (event for event in events if event.kind == "backward")
        reduced = [event for event in events if event.kind == "communication"]
        assert len(reduced) == 1 + 4
        assert all(event.start_ns >= backward.end_ns for event in reduced)

    run_ranks(work, 2)
