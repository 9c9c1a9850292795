import importlib
import json
import sys
import types

import pytest

import comm.algorithms.pipelined_ring
import comm.algorithms.reduction
import comm.collectives
import comm.cost
import comm.shards
from lab import replace
from lab.ranks import RankError, run_ranks
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


def test_a_module_first_imported_meanwhile_has_the_original_afterwards(tmp_path, monkeypatch):
    (tmp_path / "late_comer.py").write_text("from comm.shards import shard_sizes\n")
    monkeypatch.syspath_prepend(tmp_path)
    with replaced("comm.shards.shard_sizes", everything_to_rank_0):
        late_comer = importlib.import_module("late_comer")
        assert late_comer.shard_sizes is everything_to_rank_0
    assert late_comer.shard_sizes is comm.shards.shard_sizes


def test_the_inner_one_of_two_replacements_wins_until_it_ends():
    def first(*args):
        return 1

    def second(*args):
        return 2

    with replaced("comm.algorithms.pipelined_ring.chunk_sent", first):
        with replaced("comm.algorithms.pipelined_ring.chunk_sent", second):
            assert comm.algorithms.pipelined_ring.chunk_sent(0, 0, 3) == 2
            assert replace.active() == {"comm.algorithms.pipelined_ring.chunk_sent": second}
        assert comm.algorithms.pipelined_ring.chunk_sent(0, 0, 3) == 1
        assert replace.active() == {"comm.algorithms.pipelined_ring.chunk_sent": first}
    assert comm.algorithms.pipelined_ring.chunk_sent(0, 0, 3) == 2  # rank 0 begins with chunk 2
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


def test_a_mistake_in_a_replacement_shows_its_own_line():
    def broken(op, reduced, ranks):
        raise ValueError("not written yet")

    def reduce_all(cluster) -> None:
        comm.collectives.all_reduce(comm.algorithms.pipelined_ring.torch.ones(2))

    with replaced("comm.algorithms.reduction.divide_if_mean", broken), pytest.raises(RankError) as error:
        run_ranks(reduce_all, 2)
    assert 'raise ValueError("not written yet")' in str(error.value)


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


def test_what_is_at_home_in_a_library_is_replaced_in_libraries_and_here(monkeypatch):
    by_hand = types.ModuleType("made_by_hand")
    by_hand.decoder = original = json.decoder.JSONDecoder
    monkeypatch.setitem(sys.modules, "made_by_hand", by_hand)
    with replaced("json.decoder.JSONDecoder", Forgetful):
        assert json.JSONDecoder is by_hand.decoder is Forgetful
    assert json.JSONDecoder is by_hand.decoder is original


def test_a_class_method_stays_one_when_a_plain_function_replaces_it():
    from context_parallel.sequence_cut import SequenceCut

    with replaced("context_parallel.sequence_cut.SequenceCut.zigzag", lambda cls, *sizes: (cls, sizes)):
        assert SequenceCut.zigzag(8, 2) == (SequenceCut, (8, 2))
    assert SequenceCut.zigzag(8, 2).length(0) == 4
