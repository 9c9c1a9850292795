"""Ranks of one machine share its cores, and MKL's vector functions are first called in one thread."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comm import rendezvous
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


class Calls(TorchDispatchMode):
    """A mode that collects the called operations, with the type and size of their tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((op.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return op(*args, **(kwargs or {}))


def test_a_rank_calls_the_functions_of_an_optimizer_once_in_one_thread_before_its_first_step():
    def calls(cluster) -> set[tuple[str, torch.dtype, int]]:
        set_variables({})
        with Calls() as calls:
            rendezvous.join()
        return calls.seen

    (seen,) = run_ranks(calls, 1, backend=None)
    for name in ("sqrt", "exp", "log", "tanh"):
        assert {(name, torch.float32, 1), (name, torch.float64, 1)} <= seen
