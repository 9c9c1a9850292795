import pytest

import comm.algorithms.pipelined_ring
import comm.algorithms.reduction
import comm.collectives
import comm.cost
import comm.shards
from lab import replace
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Ledger


def everything_to_rank_0(numel: int, ranks: int) -> list[int]:
    return [numel] + [0] * (ranks - 1)


class Forgetful(Ledger):
    def count(self, *args, **kwargs) -> None:
        pass


def test_a_function_is_replaced_wherever_it_was_imported_by_name_and_comes_back():
    original = comm.shards.shard_sizes
    assert comm.cost.shard_sizes is original and comm.collectives.shard_sizes is original
    with replaced("comm.shards.shard_sizes", everything_to_rank_0):
        for module in (comm.shards, comm.cost, comm.collectives):
            assert module.shard_sizes is everything_to_rank_0
        assert [
            len(part)
            for part in comm.algorithms.pipelined_ring.shards_of(
                comm.algorithms.pipelined_ring.torch.ones(5), 3
            )
        ] == [5, 0, 0]
    for module in (comm.shards, comm.cost, comm.collectives):
        assert module.shard_sizes is original


def test_a_class_and_a_single_method_can_be_replaced():
    class_before, method_before = Ledger, Ledger.count
    with replaced("lab.trace.ledger.Ledger", Forgetful):
        assert Ledger is Forgetful  # this file's own name for it as well
    assert Ledger is class_before
    counted = LEDGER.total()
    with replaced("lab.trace.ledger.Ledger.count", Forgetful.count):
        LEDGER.count("all_reduce", "ring", 100)
        assert LEDGER.total() == counted
    assert Ledger.count is method_before


def test_the_original_comes_back_after_an_error_too():
    original = comm.algorithms.reduction.divide_if_mean
    with pytest.raises(ZeroDivisionError), replaced("comm.algorithms.reduction.divide_if_mean", print):
        assert comm.algorithms.pipelined_ring.divide_if_mean is print
        raise ZeroDivisionError
    assert (
        comm.algorithms.reduction.divide_if_mean is original
        and comm.algorithms.pipelined_ring.divide_if_mean is original
    )
    assert replace.active() == {}


def test_what_is_replaced_here_is_replaced_in_every_rank():
    def look(cluster) -> tuple[list[int], list[int]]:
        import comm.collectives
        import comm.shards

        return comm.shards.shard_sizes(3, 2), comm.collectives.shard_sizes(3, 2)

    def in_a_closure(numel: int, ranks: int) -> list[int]:
        return [numel, 7]

    with replaced("comm.shards.shard_sizes", in_a_closure):
        assert run_ranks(look, 2) == [([3, 7], [3, 7])] * 2
    assert run_ranks(look, 2) == [([2, 1], [2, 1])] * 2


@pytest.mark.parametrize(
    "path",
    [
        "comm.algorithms.pipelined_ring.no_such_function",
        "comm.no_such_module.function",
        "no_such_package.function",
        "lab.trace.ledger.Ledger.no_such_method",
        "lab.trace.ledger.NoSuchClass.method",
        "comm.algorithms.pipelined_ring.chunk_sent.attribute",
        "ring",
    ],
)
def test_a_name_that_does_not_exist_is_refused(path: str):
    with pytest.raises(LookupError, match=f"Nothing to replace at {path}"):
        with replaced(path, print):
            pass
