"""A report of a hang draws which rank waits for which, as a cycle where there is one."""

import pytest
import torch

from comm.collectives import all_reduce
from comm.point_to_point import recv, send
from lab.ranks import RankError, run_ranks
from lab.ranks.waiting import Wait, chain


@pytest.mark.parametrize(
    "peers, ranks", [({0: 1, 1: 0}, [0, 1]), ({0: 1, 1: 2, 2: 1}, [1, 2]), ({2: 0, 3: 2}, [3, 2]), ({}, [])]
)
def test_a_cycle_is_found_before_the_longest_chain(peers, ranks):
    assert chain({rank: Wait("receive from", peer) for rank, peer in peers.items()}) == ranks


def report_of(work, **options: float) -> str:
    with pytest.raises(RankError) as error:
        run_ranks(work, 2, **options)
    return str(error.value).splitlines()[-1].strip()


def test_two_ranks_that_send_first_are_drawn_as_a_cycle():
    def work(cluster) -> None:
        send(torch.ones(10), 1 - cluster.rank)
        recv(torch.ones(10), 1 - cluster.rank)

    first, second = "rank 0 waits to send 40 bytes to rank 1", "rank 1 waits to send 40 bytes to rank 0"
    cycle = "a cycle, in which each rank waits for the next: "
    assert report_of(work, timeout=60, look_every=0.3) == f"{cycle}{first} -> {second}"


def test_a_rank_that_never_comes_to_a_collective_is_named_with_what_the_other_waits_for():
    def calls_alone(cluster) -> None:
        if cluster.rank == 1:
            all_reduce(torch.ones(4), pattern="ring", async_op=True).wait()  # on a thread of its own

    waits = "rank 0 keeps the others waiting: rank 1 waits to receive a header from rank 0 in all_reduce"
    assert report_of(calls_alone, timeout=2) == waits
