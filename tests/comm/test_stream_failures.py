"""Over streams too a death, a pause, a full memory or a wrong call ends in a sentence, and leaves nothing."""

import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch

from comm.collectives import CommError, all_reduce, barrier, broadcast
from comm.transport import segment
from comm.transport.choice import CAN_POLL, use_transport
from comm.transport.memory_ends import MemoryOut
from comm.transport.stream_ends import StreamOut
from lab.ranks import run_ranks
from lab.replace import replaced
from tests.comm.mismatches import error_text
from tests.comm.test_streams import ends
from tests.comm.transports import over

pytestmark = pytest.mark.skipif(not CAN_POLL, reason="the transports poll sockets")


@pytest.mark.parametrize("transport", ["sockets", "tcp", "shared_memory"])
def test_a_rank_that_dies_while_its_messages_are_on_their_way_is_an_error_and_never_garbage(transport: str):
    def one_dies(cluster) -> str:
        x = torch.full((3_000_000,), float(cluster.rank))
        broadcast(x, root=1)
        if cluster.rank == 1:
            x.fill_(7)
            with replaced("comm.transport.streams.Streams.finish", die):
                all_reduce(x, pattern="flat")
            die()
        text = error_text(lambda: all_reduce(x, pattern="flat"))
        return text or f"values {sorted(set(x.tolist()))}"

    texts = run_ranks(
        lambda cluster: over(transport, cluster, one_dies), 3, collect_failures=True, group_timeout=20
    )
    for rank in (0, 2):
        assert "has died or left" in str(texts[rank]) or texts[rank] == "values [9.0]", texts[rank]


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize("transport", ["sockets", "tcp", "shared_memory"])
def test_a_paused_rank_is_waited_for_until_the_timeout_and_named(transport: str):
    def one_is_paused(cluster) -> str:
        barrier()
        if cluster.rank == 1:
            cluster.store.set("sleeper", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)  # itself, so that it holds no lock of the store
            return ""
        sleeper = int(cluster.store.get("sleeper"))
        start = time.monotonic()
        text = error_text(lambda: all_reduce(torch.ones(100_000), pattern="ring"))
        assert time.monotonic() - start < 10
        if cluster.store.add("given up", 1) == 2:
            os.kill(sleeper, signal.SIGCONT)
        return text

    texts = run_ranks(lambda cluster: over(transport, cluster, one_is_paused), 3, group_timeout=1.5)
    for rank in (0, 2):
        assert "it waited until the timeout" in texts[rank]


@pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")
def test_mismatches_leave_no_connection_and_no_memory_behind():
    def open_files(cluster) -> list[int]:
        counts = []
        for _ in range(6):
            for transport in ("shared_memory", "sockets"):
                use_transport(transport)
                with pytest.raises(CommError):
                    all_reduce(torch.ones(1 + cluster.rank))
                all_reduce(torch.ones(3))
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    for counts in run_ranks(open_files, 3):
        assert len(set(counts[1:])) == 1


@pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")
def test_a_full_memory_is_one_sentence():
    def full(cluster) -> str:
        use_transport("shared_memory")

        def no_space(*_) -> None:
            raise OSError(28, "No space left on device")

        with replaced("os.posix_fallocate", no_space):
            return error_text(lambda: all_reduce(torch.ones(3)))

    texts = run_ranks(full, 2, group_timeout=5)
    assert all(texts)  # the second one may only notice that the first one has left
    assert any(
        "not enough memory for a shared segment" in text
        and text.endswith("(No space left on device); free some, or use another transport.")
        for text in texts
    )


@pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")
def test_ranks_without_memory_to_share_use_sockets_by_default():
    def one_is_full(cluster) -> tuple[set[type], set[type]]:
        def no_space(*_) -> None:
            raise OSError(27, "File too large")

        with replaced("os.posix_fallocate", no_space) if cluster.rank == 1 else nullcontext():
            x = torch.ones(300_000)
            all_reduce(x)
        assert (x == 3).all()
        return ends("auto")

    outgoing = [out for out, _ in run_ranks(one_is_full, 3)]
    assert outgoing == [{MemoryOut}, {StreamOut}, {MemoryOut}]


def test_a_transport_that_does_not_exist_is_refused():
    with pytest.raises(
        CommError, match="no transport 'pigeon'; choose one of auto, shared_memory, sockets, gloo"
    ):
        use_transport("pigeon")
