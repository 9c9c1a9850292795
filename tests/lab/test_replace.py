import pytest

import comm.algorithms.pipelined_ring
import comm.algorithms.ring
import comm.collectives
import comm.cost
import comm.patterns
import comm.shards
from lab import replace
from lab.ranks import run_ranks
from lab.replace import replaced
from pipeline_parallel.schedules import gpipe, one_f_one_b, table_of

BINDING = (comm.shards, comm.cost, comm.collectives)


def test_a_function_is_replaced_wherever_it_was_imported_by_name_and_comes_back_also_after_an_error():
    def everything_to_rank_0(numel: int, ranks: int) -> list[int]:
        return [numel] + [0] * (ranks - 1)

    original = comm.shards.shard_sizes
    with pytest.raises(ZeroDivisionError), replaced("comm.shards.shard_sizes", everything_to_rank_0):
        assert {module.shard_sizes for module in BINDING} == {everything_to_rank_0}
        raise ZeroDivisionError
    assert {module.shard_sizes for module in BINDING} == {original} and replace.active() == {}


def test_a_function_is_replaced_in_a_modules_table_of_functions_too():
    table = one_f_one_b(2, 3)
    with replaced("pipeline_parallel.schedules.gpipe", lambda stages, microbatches: table):
        assert table_of("gpipe", 2, 3) is table
    assert table_of("gpipe", 2, 3) == gpipe(2, 3) != table


def test_a_function_is_replaced_in_the_tables_of_a_module_too():
    def nothing(wire, tensor, op) -> None: ...

    ring = comm.algorithms.ring
    original = ring.all_reduce
    with replaced("comm.algorithms.ring.all_reduce", nothing):
        assert comm.patterns.ALGORITHMS["all_reduce"]["ring"] is ring.all_reduce is nothing
    assert comm.patterns.ALGORITHMS["all_reduce"]["ring"] is ring.all_reduce is original


def test_what_is_replaced_here_is_replaced_in_every_rank():
    def look(cluster) -> tuple[list[int], list[int]]:
        import comm.collectives
        import comm.shards

        return comm.shards.shard_sizes(3, 2), comm.collectives.shard_sizes(3, 2)

    with replaced("comm.shards.shard_sizes", lambda numel, ranks: [numel, 7]):
        assert run_ranks(look, 2) == [([3, 7], [3, 7])] * 2
    assert run_ranks(look, 2) == [([2, 1], [2, 1])] * 2
