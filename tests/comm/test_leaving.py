"""A rank may end right after a mismatch: the others still raise the same error."""

import time
from contextlib import ExitStack

import pytest
import torch

from comm import collectives, run_collective
from comm.transport.choice import use_transport
from comm.transport.streams import Streams
from lab.ranks import run_ranks
from lab.replace import replaced

LATE = 0.3  # seconds, in which a rank that does not wait has ended


def ends_alike(call, n: int, *args: object) -> str:
    """Return the error with which all ranks end, each of them at once."""
    errors = run_ranks(call, n, *args, collect_failures=True, group_timeout=20)
    sentences = {str(error).strip().splitlines()[-1].partition(": ")[2] for error in errors}
    assert len(sentences) == 1, f"not the same on all ranks: {sentences}"
    return sentences.pop()


def test_a_late_rank_raises_the_same_mismatch_though_the_others_have_read_its_header():
    fits = run_collective._shard_fits

    def late(*args) -> bool:
        time.sleep(LATE)  # its header has left
        return fits(*args)

    def differ(cluster) -> None:
        use_transport("gloo")  # over a stream a header is read even after its sender has left
        collectives.barrier()
        with ExitStack() as slowed:
            if cluster.rank == 1:
                slowed.enter_context(replaced("comm.run_collective._shard_fits", late))
            collectives.all_reduce(torch.ones(5 + cluster.rank))

    for n in (2, 3):
        assert "rank 1: all_reduce(ring, sum) of 6 elements" in ends_alike(differ, n)


@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_a_late_rank_raises_the_same_mismatch_over_streams(transport: str):
    move = Streams._move

    def differ(cluster) -> None:
        use_transport(transport)
        x = torch.ones(100_000)
        collectives.all_reduce(x)
        calls = 0

        def late(self: Streams) -> bool:
            nonlocal calls
            calls += 1
            if calls == 2:  # the header has left
                time.sleep(LATE)
            return move(self)

        with ExitStack() as slowed:
            if cluster.rank == 1:
                slowed.enter_context(replaced("comm.transport.streams.Streams._move", late))
            collectives.all_reduce(x[cluster.rank :])

    for n in (2, 3):
        assert "rank 1: all_reduce" in ends_alike(differ, n)
