"""pattern="auto" takes the pattern that is predicted to be fastest, the same on every rank."""

import pytest
import torch

from comm import collectives, cost
from comm.collectives import PATTERNS, pattern_for
from comm.cost import Link
from comm.wire import slow_link
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Traffic
from tests.comm.mismatches import error_text

MIB = 1 << 20


def test_few_messages_win_for_small_tensors_and_few_bytes_for_large_ones():
    def choose(cluster) -> list[str]:
        with replaced("comm.cost.link_of", lambda group: Link(1e-4, 1e-9)):
            sizes = (1, 1000, 10_000, MIB, 64 * MIB)
            return [pattern_for("all_reduce", "auto", size) for size in sizes]

    for chosen in run_ranks(choose, 3):
        assert chosen == ["flat"] * 3 + ["pipelined_ring"] * 2


def test_every_pattern_is_chosen_for_the_seconds_of_its_formula():
    with_seconds = {"broadcast": {"tree", "flat"}, "reduce": {"tree", "flat", "pairwise"}}

    def choose(cluster) -> None:
        for op, patterns in with_seconds.items():
            for alpha, num_bytes in ((1e-6, 64 * MIB), (1e-3, 8)):
                link = Link(alpha, 1e-9)
                with replaced("comm.cost.link_of", lambda group, link=link: link):
                    chosen = pattern_for(op, "auto", num_bytes)
                best = min(cost.seconds(op, one, num_bytes, 4, link) for one in patterns)
                assert cost.seconds(op, chosen, num_bytes, 4, link) <= 1.05 * best

    run_ranks(choose, 4)


@pytest.mark.parametrize("n", [1, 2, 3])
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
            uneven = [[(p + q) % 3 for q in range(n)] for p in range(n)]
            sent, got = [float(r)] * sum(uneven[r]), [uneven[p][r] for p in range(n)]
            x = torch.empty(sum(got))
            collectives.all_to_all(x, torch.tensor(sent), got, uneven[r], pattern="auto")
            assert x.tolist() == [float(p) for p in range(n) for _ in range(got[p])]
            collectives.barrier(pattern="auto")

    run_ranks(call_all, n)


def test_a_link_is_measured_once_on_all_ranks_alike_and_not_counted():
    def count(cluster) -> tuple[Link, Link]:
        LEDGER.clear()
        chosen = pattern_for("all_reduce", "auto", 4000)
        assert LEDGER.total() == Traffic()
        collectives.all_reduce(torch.ones(1000), pattern="auto")
        assert {entry.pattern for entry in LEDGER.rows()} == {chosen, "header"}
        expected = cost.expected_traffic("all_reduce", "auto", 1000, 4)
        assert LEDGER.total() == expected
        fast = cost.link_of(None)
        with slow_link.slowed(Link(0.01, 1e-9)):  # another link is measured again
            slow = cost.link_of(None)
        assert cost.link_of(None) is fast and slow.alpha > 0.009 > fast.alpha > 0
        return fast, slow

    assert len(set(run_ranks(count, 2))) == 1


def test_the_reason_names_the_seconds_of_all_patterns_the_fastest_first():
    def explain(cluster) -> str:
        with replaced("comm.cost.link_of", lambda group: Link(0.001, 0.0)):
            return cost.reason("broadcast", MIB)

    assert run_ranks(explain, 4)[0] == "flat 3.000 ms, tree 4.000 ms"


def test_an_unknown_pattern_is_refused_and_auto_is_offered():
    def ask(cluster) -> str:
        return error_text(lambda: collectives.broadcast(torch.ones(1), pattern="zigzag"))

    text = run_ranks(ask, 1)[0]
    assert text == "broadcast has no pattern 'zigzag'; choose one of auto, torch, tree, flat."
    assert set(PATTERNS["broadcast"]) == {"tree", "flat"}
