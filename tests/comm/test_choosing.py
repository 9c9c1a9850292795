"""pattern="auto" takes the pattern that is measured to be fastest, the same on every rank."""

import pytest
import torch

from comm import choosing, collectives, shared_tensors
from comm.collectives import PATTERNS, pattern_for
from comm.cost import Link
from comm.transport import segment
from comm.wire import slow_link
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.mismatches import error_text

MIB = 1 << 20


def as_if(seconds_of: dict[str, Link], by_rank: float = 0.0, rank: int = 0):
    """Let each pattern take alpha + bytes * beta seconds, and `by_rank` more on each further rank."""

    def timed(op, run, tensors, group, pattern: str) -> float:
        link = seconds_of.get(pattern, Link(1.0, 1.0))
        return link.alpha + tensors[0].nbytes * link.beta + by_rank * rank

    return replaced("comm.choosing._timed", timed)


def test_few_messages_win_for_small_tensors_and_few_bytes_for_large_ones():
    def choose(cluster) -> list[str]:
        flat, ring = Link(1e-5, 3e-9), Link(1e-4, 1e-9)  # equal at 45 000 bytes
        with as_if({"flat": flat, "ring": ring}):
            return [
                pattern_for("all_reduce", "auto", size)
                for size in (1, 64, 1000, 44_000, 46_000, MIB, 4 * MIB, 64 * MIB)
            ]

    for chosen in run_ranks(choose, 3):
        assert chosen == ["flat"] * 4 + ["ring"] * 4


def test_all_ranks_take_the_same_pattern_though_each_measures_other_times():
    def choose(cluster) -> str:
        tree = Link(1e-3 * (cluster.rank == 0), 0.0)  # slow on rank 0 only
        flat = Link(1e-3 * (cluster.rank == 2) / 2, 0.0)
        with as_if({"tree": tree, "flat": flat}):
            return pattern_for("broadcast", "auto", 1000)

    assert run_ranks(choose, 3) == ["flat"] * 3


def test_the_time_between_two_measured_sizes_is_linear_and_beyond_the_last_one_too():
    times = [1.0, 2.0, 3.0, 6.0]  # at the first four sizes
    at = [choosing.seconds(times, size) for size in (0, 64, 64 << 10, (64 << 10) + (MIB - (64 << 10)) // 2)]
    assert at == pytest.approx([1.0, 1.0, 2.0, 2.5])
    assert choosing.seconds(times, 31 * MIB) == pytest.approx(9.0)
    assert choosing.seconds([1.0, 0.5], 7 * MIB) == 1.0  # no time is negative


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_operation_with_auto_is_right(n: int):
    def call_all(cluster) -> None:
        r = cluster.rank
        for numel in (0, 1, 7, 5000):
            full = torch.arange(numel, dtype=torch.float64) + r
            parts = torch.arange(numel, dtype=torch.float64).tensor_split(n)
            total = torch.arange(numel, dtype=torch.float64) * n + sum(range(n))
            shard = torch.empty_like(parts[r])
            collectives.all_reduce(x := full.clone(), pattern="auto")
            assert torch.equal(x, total)
            collectives.reduce(x := full.clone(), root=n - 1, pattern="auto")
            assert r != n - 1 or torch.equal(x, total)
            collectives.broadcast(x := full.clone(), root=n - 1, pattern="auto")
            assert torch.equal(x, full - r + n - 1)
            collectives.reduce_scatter(shard, full, pattern="auto")
            assert torch.equal(shard, total.tensor_split(n)[r])
            collectives.all_gather(x := torch.empty_like(full), parts[r], pattern="auto")
            assert torch.equal(x, full - r)
            collectives.scatter(shard, full, pattern="auto")
            assert torch.equal(shard, parts[r])
            collectives.gather(parts[r], x := torch.empty_like(full), pattern="auto")
            assert r or torch.equal(x, full)
            collectives.all_to_all(x := torch.empty(2 * n), torch.full((2 * n,), float(r)), pattern="auto")
            assert x.tolist() == [float(p) for p in range(n) for _ in range(2)]
            uneven = [[(p + q) % 3 for q in range(n)] for p in range(n)]
            sent, got = [float(r)] * sum(uneven[r]), [uneven[p][r] for p in range(n)]
            x = torch.empty(sum(got))
            collectives.all_to_all(x, torch.tensor(sent), got, uneven[r], pattern="auto")
            assert x.tolist() == [float(p) for p in range(n) for _ in range(got[p])]
            collectives.barrier(pattern="auto")

    with replaced("comm.choosing.SIZES", (64, 4096)), replaced("comm.choosing.RUNS", (2, 2)):
        run_ranks(call_all, n)


def test_what_is_measured_is_not_counted_and_it_is_measured_once():
    def count(cluster) -> None:
        LEDGER.clear()
        chosen = pattern_for("all_reduce", "auto", 4000)
        assert LEDGER.total() == Traffic()
        collectives.all_reduce(torch.ones(1000), pattern="auto")
        assert {entry.pattern for entry in LEDGER.rows()} == {chosen, "header"}
        with as_if({"tree": Link(0.0, 0.0)}):  # too late: it has been measured
            assert pattern_for("all_reduce", "auto", 4000) == chosen
            with slow_link.slowed(Link(0.0, 1e-9)):  # another link is measured again
                assert pattern_for("all_reduce", "auto", 4000) == "tree"
        LEDGER.count("all_reduce", "tree", 8)
        assert LEDGER.rows()[Entry("all_reduce", "tree")].bytes_sent >= 8

    run_ranks(count, 2)


def test_on_a_slow_link_large_sizes_are_not_measured():
    def sizes(cluster) -> int:
        measured: list[int] = []

        def timed(op, run, tensors, group, pattern: str) -> float:
            measured.append(tensors[0].nbytes)
            return tensors[0].nbytes * 1e-6

        with replaced("comm.choosing._timed", timed):
            pattern_for("broadcast", "auto", MIB)
        return max(measured)

    assert set(run_ranks(sizes, 2)) == {64 << 10}


def test_only_sizes_that_are_needed_are_measured_and_only_patterns_that_may_win():
    def sizes(cluster) -> list[set[tuple[int, str]]]:
        measured: set[tuple[int, str]] = set()

        def timed(op, run, tensors, group, pattern: str) -> float:
            measured.add((tensors[0].nbytes, pattern))
            return {"tree": 1e-4, "flat": 2.1e-4}[pattern]

        found = []
        with replaced("comm.choosing._timed", timed):
            for num_bytes in (10, 65 << 10, 64 * MIB):
                pattern_for("broadcast", "auto", num_bytes)
                found.append(set(measured))
        return found

    small, middle, large = run_ranks(sizes, 2)[0]
    assert small == {(size, pattern) for size in (64, 64 << 10) for pattern in ("tree", "flat")}
    assert middle - small == {(MIB, "tree")}
    assert large - middle == {(16 * MIB, "tree"), (64 * MIB, "tree")}


def test_a_link_that_lets_a_first_burst_through_does_not_hide_the_pattern_that_sends_less():
    def choose(cluster) -> list[str]:
        def timed(op, run, tensors, group, pattern: str) -> float:
            known = {"flat": (1e-4, 2e-8), "tree": (2e-4, 4e-8), "ring": (3e-4, 1e-8)}
            latency, beta = known.get(pattern, (4e-4, 4e-8))
            num_bytes = tensors[0].nbytes
            return latency if num_bytes <= 64 << 10 else num_bytes * beta

        with replaced("comm.choosing._timed", timed):
            return [pattern_for("all_reduce", "auto", size) for size in (1000, MIB, 16 * MIB)]

    assert run_ranks(choose, 2) == [["flat", "ring", "ring"]] * 2


def test_the_reason_names_the_seconds_of_all_patterns_the_fastest_first():
    def explain(cluster) -> list[str]:
        before = choosing.reason("broadcast", MIB)
        with as_if({"tree": Link(0.002, 0.0), "flat": Link(0.001, 2e-9)}):
            pattern_for("broadcast", "auto", MIB)
        return [before, choosing.reason("broadcast", 64), choosing.reason("broadcast", MIB)]

    assert run_ranks(explain, 2)[0] == [
        "",
        "flat 1.000 ms, tree 2.000 ms",
        "tree 2.000 ms, flat 3.097 ms",
    ]


@pytest.mark.skipif(not segment.is_possible(), reason="memory without a name is Linux's")
def test_a_tensor_that_the_ranks_share_is_reduced_in_place():
    def reduce_it(cluster) -> None:
        x = shared_tensors.zeros(100).fill_(1.0)
        LEDGER.clear()
        collectives.all_reduce(x[10:20], pattern="auto")
        assert x.sum() == 110
        assert Entry("all_reduce", "in_place") in LEDGER.rows()

    run_ranks(reduce_it, 2)


def test_an_unknown_pattern_is_refused_and_auto_is_offered():
    def ask(cluster) -> str:
        return error_text(lambda: collectives.broadcast(torch.ones(1), pattern="zigzag"))

    text = run_ranks(ask, 1)[0]
    assert text == "broadcast has no pattern 'zigzag'; choose one of auto, torch, tree, flat."
    assert set(PATTERNS["broadcast"]) == {"tree", "flat"}
