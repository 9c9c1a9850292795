"""A rank reads its peer's memory directly, if the kernel allows it, and only its peer's."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from comm.collectives import all_reduce
from comm.transport import cross_memory, segment, streams
from comm.wire.wire import group_of
from lab.ranks import run_ranks
from lab.replace import replaced

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cross-memory attach is Linux's")


def summed(cluster, numel: int = 300_000) -> list[bool]:
    """Check an all-reduce, and return of which peers this rank reads the memory."""
    x = torch.arange(numel, dtype=torch.float64) * (cluster.rank + 1)
    all_reduce(x, pattern="flat")
    all_reduce(x, pattern="ring")
    n = cluster.world_size
    assert torch.equal(x, torch.arange(numel, dtype=torch.float64) * (n * (n * (n + 1) // 2)))
    [own] = [
        made for (_, is_for_messages), made in streams._streams[group_of(None)].items() if not is_for_messages
    ]
    return [peer.incoming._pid > 0 for peer in own.peers()]


def refused(*_) -> int:
    raise PermissionError("not yours")


def test_ranks_on_one_machine_read_each_others_memory():
    assert run_ranks(summed, 3) == [[True, True]] * 3


@pytest.mark.parametrize("what", ["the kernel says no", "another process has that id", "another system"])
def test_a_rank_that_cannot_read_gets_its_messages_through_the_buffer_and_the_others_read_on(what: str):
    def one_cannot(cluster) -> list[bool]:
        if cluster.rank != 1:
            return summed(cluster)
        if what == "another system":
            with replaced("comm.transport.cross_memory._vm_readv", None):
                return summed(cluster)
        reader = {"the kernel says no": refused, "another process has that id": lambda *_: 16}[what]
        with replaced("comm.transport.cross_memory.read_memory", reader):
            return summed(cluster)

    assert run_ranks(one_cannot, 3) == [[True, True], [False, False], [True, True]]


def test_a_process_is_read_only_if_it_shows_the_segment_that_both_share():
    def meet(cluster) -> list[bool]:
        shared, descriptor = segment.create()
        os.close(descriptor)
        cluster.store.set(
            f"at {cluster.rank}", f"{os.getpid()} {shared.nonce_address} {bytes(shared.nonce).hex()}"
        )
        pids, addresses, nonces = [], [], []
        for rank in range(2):
            pid, address, nonce = cluster.store.get(f"at {rank}").decode().split()
            pids.append(int(pid))
            addresses.append(int(address))
            nonces.append(memoryview(bytes.fromhex(nonce)))
        found = [
            cross_memory.can_read(pids[0], addresses[0], nonces[0]),
            cross_memory.can_read(pids[1], addresses[1], nonces[1]),
            cross_memory.can_read(pids[0], addresses[0], nonces[1]),
            cross_memory.can_read(pids[1], addresses[1] + 16, nonces[1]),
            cross_memory.can_read(pids[1], 8, nonces[1]),
            cross_memory.can_read(0, addresses[1], nonces[1]),
        ]
        dist.barrier()
        return found

    for found in run_ranks(meet, 2):
        assert found == [True, True, False, False, False, False]
