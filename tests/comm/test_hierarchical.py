"""A hierarchical all-reduce equals one process on any placement of ranks, and sends less between hosts."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm import collectives, cost
from comm.algorithms import hierarchical, pipelined_ring
from comm.collectives import Group
from comm.cost import Link
from comm.wire.gloo_wire import peer_wire
from comm.wire.hosts import VARIABLE, hosts_of
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.collective_cases import DTYPES, LAYOUTS, REDUCTIONS, Case, run_cases
from tests.comm.helpers import error_text, short_segments, works
from tests.on_ranks import on_ranks

PLACEMENTS = {  # the host of each rank, by the number of ranks
    1: ["a"],
    2: ["aa", "ab"],
    3: ["aaa", "abc"],
    4: ["aabb", "abab", "abba", "abcd"],
    6: ["aabbcc", "aaabbb", "abcabc"],
}


@on_ranks(4)
def test_hierarchical_all_reduce_equals_one_process(cluster):
    # Four ranks have eight numbers each. One process takes their mean.
    torch.manual_seed(0)
    of_ranks = torch.randn(4, 8).double()
    expected, mine = of_ranks.mean(0), of_ranks[cluster.rank].clone()

    # Ranks 0 and 1 stand for one host, and ranks 2 and 3 for another one.
    os.environ[VARIABLE] = ["a", "a", "b", "b"][cluster.rank]
    wire = peer_wire(None)
    assert hosts_of(wire) == [0, 0, 1, 1]
    host, place = divmod(cluster.rank, 2)

    # Step 1 stays within a host: a rank gets the sum of its host, for one half of the tensor. It sends
    # the other half: 4 numbers.
    half = torch.empty(4).double()
    own_host = hierarchical.SomeRanks(wire, [2 * host, 2 * host + 1])
    pipelined_ring.reduce_scatter(own_host, half, mine, "sum")
    of_host = of_ranks[2 * host] + of_ranks[2 * host + 1]
    assert torch.equal(half, of_host.tensor_split(2)[place])

    # Step 2 is between hosts: the two ranks that have the first half add it up, and so do the other two.
    # Each sends 2 numbers and then 2 sums, so 2 ranks send 8 numbers out of a host: one tensor.
    pipelined_ring.all_reduce(hierarchical.SomeRanks(wire, [place, place + 2]), half, "sum")
    torch.testing.assert_close(half / 4, expected.tensor_split(2)[place], rtol=1e-9, atol=1e-12)

    # Step 3 stays within a host again: its two ranks exchange the finished halves.
    full = torch.empty(8).double()
    pipelined_ring.all_gather(own_host, full, half / 4)
    torch.testing.assert_close(full, expected, rtol=1e-9, atol=1e-12)

    # The collective does all three. A rank sends as many bytes as in a flat ring, in 4 messages instead
    # of 6. In the flat ring, ranks 1 and 3 send all their 12 numbers to the other host.
    collectives.all_reduce(mine, "mean", pattern="hierarchical")
    assert torch.equal(mine, full)
    assert LEDGER.rows()[Entry("all_reduce", "hierarchical")] == Traffic((4 + 2 + 2 + 4) * 8, 4)


def two_links(_: Group, ring: Sequence[int] | None = None) -> Link:
    """Within a host a message of a byte takes a thousandth of the time that it takes between hosts."""
    return Link(1e-4, 1e-6) if ring is None else Link(1e-6, 1e-9)


@on_ranks(4)
def test_auto_takes_it_for_large_tensors_on_hosts_with_a_slow_link_between_them(cluster):
    """Its time is that of a ring in each host, and of one between the hosts, which share nothing."""
    num_bytes, inner, outer = 1 << 20, two_links(None, [0, 1]), two_links(None)
    for host, expected in (("aabb", "hierarchical"), ("aaaa", "pipelined_ring"), ("aaab", "pipelined_ring")):
        os.environ[VARIABLE] = host[cluster.rank]
        group = dist.new_group()  # the hosts of a group are asked for once
        with replaced("comm.cost.link_of", two_links):
            assert cost.pattern_for("all_reduce", "auto", num_bytes, group) == expected
    by_formula = 2 * (inner.alpha + num_bytes / 2 * inner.beta) + 2 * (
        outer.alpha + num_bytes / 2 * outer.beta
    )
    headers = inner.alpha + outer.alpha
    predicted = cost.hierarchical_seconds(num_bytes, 4, 2, inner, outer)
    assert predicted == pytest.approx(by_formula + headers)
    assert cost.link_of(group, [cluster.rank ^ 1, cluster.rank]).alpha > 0


@contextmanager
def placed(cluster, names: str, members: list[int] | None = None) -> Iterator[dist.ProcessGroup]:
    """Provide a group of all ranks, or of `members`. Rank r of all ranks is on the host names[r]."""
    os.environ[VARIABLE] = names[cluster.rank]
    try:
        yield dist.new_group(members or range(cluster.world_size))
    finally:
        del os.environ[VARIABLE]


@pytest.mark.parametrize("n", PLACEMENTS)
def test_it_equals_one_process_on_every_placement(n: int):
    def reduce_all(cluster) -> int:
        dtypes, layouts, reductions = map(itertools.cycle, (DTYPES, LAYOUTS, REDUCTIONS))
        cases = [
            Case("all_reduce", "hierarchical", numel, next(dtypes), next(reductions), 0, next(layouts))
            for numel in (0, n - 1, 4 * n, 101)
            for _ in range(2)
        ]
        ran = []
        for names in PLACEMENTS[n]:
            with placed(cluster, names) as group:
                ran.append(run_cases(cluster, cases, group))
        return min(ran)

    with short_segments(32):
        assert min(run_ranks(reduce_all, n)) > 5


def test_what_is_counted_equals_the_formula():
    n = 6

    def count(cluster) -> None:
        r = cluster.rank
        for names in PLACEMENTS[n]:
            hosts = [sorted(set(names)).index(name) for name in names]
            with placed(cluster, names) as group:
                for numel, pattern in itertools.product((0, 5, 101), ("hierarchical", "pipelined_ring")):
                    LEDGER.clear()
                    collectives.all_reduce(torch.ones(numel), group=group, pattern=pattern)
                    case = f"{pattern} of {numel} elements on hosts {names}, rank {r}"
                    expected = cost.traffic("all_reduce", pattern, numel, 4, n, r, hosts=hosts)
                    assert LEDGER.rows().get(Entry("all_reduce", pattern), Traffic()) == expected, case
                    assert LEDGER.total() == expected, case

    with short_segments(16):
        run_ranks(count, n)


@on_ranks(4)
def test_ranks_of_one_machine_share_a_host_and_a_variable_divides_them(cluster):
    expected = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
    seen = [hosts_of(peer_wire(None))]
    for names in ("aabb", "abab", "baab"):
        with mock.patch.dict("os.environ", {VARIABLE: names[cluster.rank]}):
            seen.append(hosts_of(peer_wire(dist.new_group(range(4)))))
    assert seen == expected


def test_hosts_with_different_numbers_of_ranks_are_refused_on_all_ranks():
    def refuse(cluster) -> str:
        with placed(cluster, "aab") as group:
            x = torch.ones(5)
            text = error_text(lambda: collectives.all_reduce(x, group=group, pattern="hierarchical"))
            assert works(group)
        return text

    [text] = set(run_ranks(refuse, 3))
    assert "the hosts have 2, 1 ranks, and the pattern hierarchical needs equally many on each" in text
