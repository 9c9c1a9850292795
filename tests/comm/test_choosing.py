"""pattern="auto" takes the pattern that is predicted to be fastest, the same on every rank."""

import torch

from comm import collectives, cost
from comm.collectives import pattern_for
from comm.cost import Link
from comm.wire import slow_link
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Traffic

MIB = 1 << 20


def test_few_messages_win_for_small_tensors_and_few_bytes_for_large_ones():
    def choose(cluster) -> list[str]:
        with replaced("comm.cost.link_of", lambda group: Link(1e-4, 1e-9)):
            sizes = (1, 1000, 10_000, MIB, 64 * MIB)
            return [pattern_for("all_reduce", "auto", size) for size in sizes]

    for chosen in run_ranks(choose, 3):
        assert chosen == ["flat"] * 3 + ["pipelined_ring"] * 2


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
