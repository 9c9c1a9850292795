"""If a peer dies, sleeps or leaves, the others name it in a sentence, no rank hangs, and nothing is left."""

import os
import signal
import time

import pytest
import torch

from comm import collectives
from comm.collectives import CommError, all_reduce
from comm.wire import shared_memory
from comm.wire.transport import use_transport
from lab.ranks import RankError, run_ranks
from lab.replace import replaced
from tests.comm.helpers import error_text, over

linux = pytest.mark.skipif(not shared_memory.is_possible(), reason="the segments are Linux's")
DIED = "has died or left, so look for the first error in its log"


def die(*args, **kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def outcomes(fn, world_size: int, **options) -> list[str]:
    """Return each rank's result or the text of its error. Timeouts are long: no error may need them."""
    results = run_ranks(fn, world_size, collect_failures=True, **{"group_timeout": 40, **options})
    return [sentence(str(result)) if isinstance(result, RankError) else result for result in results]


def sentence(text: str) -> str:
    """Return the CommError at the end of a traceback."""
    return text.rsplit("comm.errors.CommError: ", 1)[-1]


@pytest.mark.parametrize(
    ("pattern", "transport"),
    [("ring", "auto"), ("tree", "sockets"), ("torch", "gloo")],
)
def test_a_rank_that_dies_before_an_all_reduce_is_named_by_those_who_meet_it(pattern: str, transport: str):
    def one_dies(cluster) -> None:
        use_transport(transport)
        collectives.barrier()
        collectives.barrier(pattern="torch")
        if cluster.rank == 2:
            die()
        all_reduce(torch.ones(10), pattern=pattern)

    texts = outcomes(one_dies, 4)
    assert texts[2] == "rank 2 was killed by SIGKILL before it returned."
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"all_reduce ({pattern}): rank {rank} ") and DIED in texts[rank]
    if pattern != "torch":
        assert any("rank 2" in texts[rank] for rank in (0, 1, 3))


@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_a_rank_that_dies_in_the_middle_of_an_all_reduce_is_named(transport: str):
    def one_dies(cluster) -> None:
        collectives.barrier()
        x = torch.ones(1_000_000)
        if cluster.rank == 2:
            with replaced("comm.algorithms.reduction.combine", die):  # its first segment has just arrived
                all_reduce(x, pattern="pipelined_ring")
        all_reduce(x, pattern="pipelined_ring")

    texts = outcomes(lambda cluster: over(transport, cluster, one_dies), 4)
    for rank in (0, 1, 3):
        assert texts[rank].startswith(f"all_reduce (pipelined_ring): rank {rank} could not ")
        assert DIED in texts[rank]
    assert any("rank 2" in texts[rank] for rank in (0, 1, 3))


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_rank_that_dies_while_its_messages_are_on_their_way_is_an_error_and_never_garbage(transport: str):
    def one_dies(cluster) -> str:
        x = torch.full((3_000_000,), float(cluster.rank))
        collectives.broadcast(x, root=1)
        if cluster.rank == 1:
            x.fill_(7)
            with replaced("comm.wire.streams.Streams.finish", die):
                all_reduce(x, pattern="flat")
        text = error_text(lambda: all_reduce(x, pattern="flat"))
        return text or f"values {sorted(set(x.tolist()))}"

    texts = outcomes(lambda cluster: over(transport, cluster, one_dies), 3)
    for rank in (0, 2):
        assert "has died or left" in texts[rank] or texts[rank] == "values [9.0]", texts[rank]


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
def test_a_paused_rank_is_waited_for_until_the_timeout_and_named(transport: str):
    def one_is_paused(cluster) -> str:
        use_transport(transport)
        collectives.barrier()
        if cluster.rank == 1:
            cluster.store.set("sleeper", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)  # itself, so that it holds no lock of the store
            return ""
        sleeper, start = int(cluster.store.get("sleeper")), time.monotonic()
        text = error_text(lambda: all_reduce(torch.ones(100_000), pattern="ring"))
        assert time.monotonic() - start < 10
        if cluster.store.add("given up", 1) == 2:
            os.kill(sleeper, signal.SIGCONT)
        return text

    texts = run_ranks(one_is_paused, 3, group_timeout=1.5)
    assert all("it waited until the timeout" in texts[rank] for rank in (0, 2))


@linux
def test_mismatches_leave_no_connection_and_no_memory_behind():
    def open_files(cluster) -> list[int]:
        counts = []
        for _ in range(4):
            for transport in ("shared_memory", "sockets"):
                use_transport(transport)
                with pytest.raises(CommError):
                    all_reduce(torch.ones(1 + cluster.rank))
                all_reduce(torch.ones(3))
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    for counts in run_ranks(open_files, 3):
        assert len(set(counts[1:])) == 1
