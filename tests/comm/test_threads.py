"""Ranks of one machine share its cores, if they were started by hand too."""

import torch

from comm.script import joined
from lab.ranks import run_ranks
from lab.replace import replaced
from tests.comm.places import places, set_variables


def threads_after_joining(cluster, environments: list[dict[str, object]], cores: list[set[int]]) -> int:
    """Join with these cores; return the number of threads with which this rank then computes."""
    set_variables(environments[cluster.rank])
    torch.set_num_threads(8)
    with (
        replaced("lab.launch.threads.own_cores", lambda: frozenset(cores[cluster.rank])),
        joined(),
    ):
        return torch.get_num_threads()


def test_ranks_started_by_hand_share_the_cores_of_their_machine():
    def threads(cores: list[set[int]], **others: object) -> list[int]:
        n = len(cores)
        return run_ranks(threads_after_joining, n, places(list(range(n)), n, **others), cores, backend=None)

    six = set(range(6))
    assert threads([six, six, six]) == [2, 2, 2]
    assert threads([{0}, {0}, {1, 2, 3}]) == [1, 1, 3], "the third is pinned to cores of its own"
    assert threads([set(range(64))]) == [8], "not more than torch takes by itself"
    assert threads([six, six], OMP_NUM_THREADS=5) == [8, 8], "torch has read it already"
