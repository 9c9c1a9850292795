"""The edges whose reader copies straight out of its neighbour's memory."""

import os
import random
import socket
import sys
from collections import deque

import pytest
import torch

from comm import cma, sockets
from comm.cma import CmaIn, CmaOut
from comm.collectives import all_reduce
from comm.edges import StreamIn, StreamOut
from comm.wire import group_of
from lab.ranks import run_ranks
from lab.replace import replaced

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cross-memory attach is Linux's")


def edge() -> tuple[CmaOut, CmaIn]:
    """Both ends in this process."""
    out, into = socket.socketpair()
    out.setblocking(False)
    into.setblocking(False)
    return CmaOut(out), CmaIn(into, os.getpid())


def close(*ends: CmaOut | CmaIn) -> None:
    for end in ends:
        end.socket.close()


def summed(cluster, numel: int = 300_000) -> tuple[type, type]:
    """The kinds of edge of this rank, once it has seen that they add up."""
    x = torch.arange(numel, dtype=torch.float64) * (cluster.rank + 1)
    all_reduce(x, pattern="cma")
    n = cluster.world_size
    assert torch.equal(x, torch.arange(numel, dtype=torch.float64) * (n * (n + 1) // 2))
    ring = sockets._sockets[group_of(None)]["cma"]
    return type(ring._left), type(ring._right)


def refused(*_) -> int:
    raise PermissionError("not yours")


def test_ranks_on_one_machine_read_each_others_memory():
    assert run_ranks(summed, 3) == [(CmaIn, CmaOut)] * 3


@pytest.mark.parametrize("what", ["the kernel says no", "another process has that id", "another system"])
def test_an_edge_whose_reader_cannot_read_is_a_stream_and_the_others_stay_as_they_are(what: str):
    def one_cannot(cluster) -> tuple[type, type]:
        if cluster.rank != 1:
            return summed(cluster)
        if what == "another system":
            with replaced("comm.cma._vm_readv", None):
                return summed(cluster)
        readers = {"the kernel says no": refused, "another process has that id": lambda *_: 16}
        honest = cma._read_memory
        calls = [readers[what]]
        with replaced("comm.cma._read_memory", lambda *args: (calls.pop() if calls else honest)(*args)):
            return summed(cluster)

    kinds = run_ranks(one_cannot, 3)
    right_of_1 = StreamOut if what == "another system" else CmaOut
    left_of_2 = StreamIn if what == "another system" else CmaIn
    assert kinds == [(CmaIn, StreamOut), (StreamIn, right_of_1), (left_of_2, CmaOut)]


def test_what_leaves_arrives_in_order_whether_it_is_read_or_sent():
    sizes = random.Random(0).choices([1, 100, cma._INLINE_BYTES, cma._INLINE_BYTES + 1, 1 << 20], k=200)
    sent = [bytearray(random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
    out, into = edge()
    queue, arrived = deque(memoryview(data) for data in sent), bytearray(sum(sizes))
    filled = 0
    while filled < len(arrived) or queue or out.is_busy:
        out.push(queue)
        filled += into.receive(memoryview(arrived)[filled : filled + 300_000])
    assert arrived == b"".join(sent)
    close(out, into)


def test_a_sender_is_not_done_before_all_of_its_memory_has_been_read():
    out, into = edge()
    data, arrived = bytearray(1 << 20), bytearray(1 << 20)
    out.push(deque([memoryview(data)]))
    assert into.receive(memoryview(arrived)[: (1 << 20) - 1]) == (1 << 20) - 1
    out.push(deque())
    assert out.is_busy
    assert into.receive(memoryview(arrived)[-1:]) == 1
    out.push(deque())
    assert not out.is_busy
    close(out, into)


def test_memory_of_a_sender_that_gave_up_is_not_taken_for_what_it_sent():
    out, into = edge()
    out.push(deque([memoryview(bytearray(1 << 20))]))
    out.socket.close()
    with pytest.raises(ConnectionError):
        into.receive(memoryview(bytearray(1 << 20)))
    close(into)


def test_a_sender_that_died_is_told_apart_from_one_that_is_slow():
    out, into = edge()
    assert into.receive(memoryview(bytearray(10))) == 0
    out.socket.close()
    with pytest.raises(ConnectionError):
        into.receive(memoryview(bytearray(10)))
    close(into)
