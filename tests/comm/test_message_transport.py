"""Messages take the transport that their ranks can have, wait without computing, and leave nothing behind."""

import gc
import os
import socket
import threading
import time
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist

from comm.point_to_point import irecv, isend, recv, send
from comm.transport import mailbox, segment
from comm.transport.choice import use_transport
from comm.transport.message_ends import Outbox
from lab.ranks import run_ranks
from lab.replace import replaced
from lab.trace.ledger import LEDGER, Entry, Traffic
from tests.comm.mismatches import error_text

pytestmark = pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")

SIZES = [1, 1000, 100_000, 3_000_001]  # bytes


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def is_through_memory(peer: int) -> bool:
    return mailbox.mailbox_of(dist.group.WORLD)._peers[peer].out is not None


def test_messages_travel_as_the_transport_says():
    def kinds(cluster) -> list[bool]:
        found = []
        for transport in ("sockets", "gloo", "auto", "shared_memory"):
            group = dist.new_group([0, 1])
            use_transport(transport, group)
            pending = [
                irecv(torch.empty(2), 1 - cluster.rank, group),
                isend(torch.ones(2), 1 - cluster.rank, group),
            ]
            for transfer in pending:
                transfer.wait()
            found.append(group in mailbox.MAILBOXES)
        return found

    assert run_ranks(kinds, 2) == [[False, False, True, True]] * 2


def no_space(*_) -> None:
    raise OSError(27, "File too large")


@pytest.mark.parametrize("place", ["full memory", "another machine"])
@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_two_ranks_that_cannot_share_memory_use_gloo_unless_they_must_share(transport: str, place: str):
    def one_cannot(cluster) -> list[str]:
        use_transport(transport)
        how = nullcontext()
        if cluster.rank == 1:
            how = (
                replaced("os.posix_fallocate", no_space)
                if place == "full memory"
                else replaced("os.readlink", lambda path: "net:[1]")
            )
        with how:
            LEDGER.clear()
            texts, peers = [], [peer for peer in range(3) if peer != cluster.rank]
            for size in (4, 2_000_000):
                got = {peer: torch.zeros(size, dtype=torch.uint8) for peer in peers}
                pending = []
                for peer in peers:
                    pending += [irecv(got[peer], peer), isend(pattern(size, cluster.rank), peer)]
                texts += [text for text in map(error_text, [one.wait for one in pending]) if text]
                for peer in peers:
                    right = torch.equal(got[peer], pattern(size, peer))
                    assert right or (transport == "shared_memory" and 1 in (peer, cluster.rank))
                if texts:
                    break
            else:
                assert LEDGER.rows() == {Entry("point_to_point", "direct"): Traffic(2 * 2_000_004, 4)}
        if cluster.rank != 1:
            assert is_through_memory(2 - cluster.rank)
        return texts

    texts = run_ranks(one_cannot, 3)
    if transport == "auto":
        assert texts == [[], [], []]
    else:
        assert [len(of_rank) for of_rank in texts] == [2, 4, 2]
        assert texts[0][0] == (
            "point_to_point (direct): rank 0 and rank 1 cannot share memory. Either one of them has none "
            "left, or rank 1 is on another machine or in another container: then take the transport auto or "
            "gloo."
        )


def test_a_rank_that_waits_uses_no_processor():
    def wait(cluster) -> float:
        x = torch.zeros(10)
        if cluster.rank == 1:
            time.sleep(1)
            send(x, 0)
            return 0.0
        start = time.process_time()
        recv(x, 1)
        return time.process_time() - start

    assert run_ranks(wait, 2)[0] < 0.5


def test_a_group_that_is_freed_leaves_no_connection_and_no_thread_behind():
    def open_files(cluster) -> list[int]:
        counts = []
        for _ in range(5):
            group = dist.new_group([0, 1, 2])
            left, right = (cluster.rank - 1) % 3, (cluster.rank + 1) % 3
            for size in SIZES:
                arriving = irecv(torch.zeros(size, dtype=torch.uint8), left, group)
                isend(pattern(size, 0), right, group).wait()
                arriving.wait()
            dist.destroy_process_group(group)
            del group, arriving
            gc.collect()
            deadline = time.monotonic() + 10
            while any(one.name in ("mailbox", "first contact") for one in threading.enumerate()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            counts.append(len(local_files()))
        return counts

    for counts in run_ranks(open_files, 3):
        assert len(set(counts)) == 1


def local_files() -> list[str]:
    """Return this process's shared memory, and its connections that are not gloo's."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket"):
                with socket.socket(fileno=os.dup(int(number))) as end:
                    name = "Unix" if end.family == socket.AF_UNIX else ""
            found += [name] if name.startswith(("Unix", "/memfd", "anon_inode:[eventfd]")) else []
    return found


def test_a_full_queue_tells_the_receiver_and_an_empty_one_does_not():
    count = 2 * segment.RING_BYTES // 1024

    def fill(cluster) -> None:
        if cluster.rank == 0:
            transfers = [isend(torch.zeros(256), 1) for _ in range(count)]
            cluster.store.set("filled", "")
            out = mailbox.mailbox_of(dist.group.WORLD)._peers[1].out
            assert isinstance(out, Outbox) and out._words[segment.HAS_MORE]
            for transfer in transfers:
                transfer.wait()
            assert not out._words[segment.HAS_MORE]
        else:
            got = torch.ones(256)
            first = irecv(got, 0)
            cluster.store.wait(["filled"])
            first.wait()
            for _ in range(count - 1):
                recv(got, 0)

    run_ranks(fill, 2)
