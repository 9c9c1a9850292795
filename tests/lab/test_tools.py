"""Comparisons, units and replacements, which tests and lessons use."""

import pytest
import torch

import comm.algorithms.pipelined_ring
import comm.algorithms.ring
import comm.collectives
import comm.cost
import comm.patterns
import comm.shards
from lab import replace, units
from lab.check import assert_same, refuse_unequal
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.units import show_bytes, show_rate, show_seconds

W = torch.tensor([1.0, -2.0, 3.0]).double()


@pytest.mark.parametrize(
    "actual, message",
    [
        ({"w": W + torch.tensor([4e-9, 0, 0]), "unused": None}, "w: off by 4e-09"),
        ({"w": W * 4, "unused": None}, "w: 4 times what it should be"),
        ({"w": W}, "unused: only one side has it"),
        ({"w": W * float("nan"), "unused": None}, "w"),
    ],
)
def test_what_differs_is_named_and_so_is_a_constant_factor(actual, message):
    expected = {"w": W, "unused": None}
    assert_same({"w": W.clone(), "unused": None}, expected, rtol=0)
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected)


def test_unequal_replicas_are_refused_and_the_ranks_named():
    refuse_unequal(["a", "a", "a"])
    with pytest.raises(WorkbookError, match="rank 1, 3 differs from rank 0"):
        refuse_unequal(["a", "b", "a", "c"])


def test_times_and_rates_are_read_as_tc_reads_them():
    assert [units.seconds(text) for text in ("500us", "0.2ms", "20ms", "1.5s")] == [5e-4, 2e-4, 0.02, 1.5]
    rates = [units.bytes_per_second(text) for text in ("800kbit", "200mbit", "1Gbit", "2.5gbit")]
    assert rates == [1e5, 25e6, 125e6, 312.5e6]


def test_other_texts_are_refused_with_an_example():
    for text in ("", "20", "ms", "-1ms", "1gbit", "1 ms", "nanms"):
        with pytest.raises(WorkbookError, match="is not a time; write one such as 2ms"):
            units.seconds(text)
    for text in ("", "100", "0mbit", "100mb", "-1gbit", "infgbit"):
        with pytest.raises(WorkbookError, match="is not a rate; write one such as 100mbit"):
            units.bytes_per_second(text)
    with pytest.raises(WorkbookError, match="'604801s' is more than a week; write a time such as 2ms"):
        units.seconds("604801s")


def test_values_are_shown_in_the_unit_that_suits_them_times_and_rates_with_four_digits():
    times = (0.07597, 1.25, 1234.5, 3.14e-5, 2.5e-10, 0.99996, 0.0)
    shown = ["75.97 ms", "1.250 s", "1,234 s", "31.40 us", "0.2500 ns", "1.000 s", "0 s"]
    assert [show_seconds(value) for value in times] == shown
    assert (show_bytes(774_900), show_bytes(3.3e6), show_bytes(12)) == ("774.9 kB", "3.3 MB", "12 bytes")
    assert (show_rate(8e-9 / 19.2), show_rate(0.0)) == ("19.20 Gbit/s", "too fast to measure")


BINDING = (comm.shards, comm.cost, comm.collectives)


def test_a_function_is_replaced_wherever_it_was_imported_by_name_and_comes_back_also_after_an_error():
    def everything_to_rank_0(numel: int, ranks: int) -> list[int]:
        return [numel] + [0] * (ranks - 1)

    original = comm.shards.shard_sizes
    with pytest.raises(ZeroDivisionError), replaced("comm.shards.shard_sizes", everything_to_rank_0):
        assert {module.shard_sizes for module in BINDING} == {everything_to_rank_0}
        raise ZeroDivisionError
    assert {module.shard_sizes for module in BINDING} == {original} and replace.active() == {}


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
