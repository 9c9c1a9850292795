"""A rank reads its neighbour's memory directly, if the kernel allows it, and only its neighbour's."""

import os
import random
import secrets
import socket
import sys
from collections import deque
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from comm.collectives import all_reduce
from comm.transport import cross_memory, sockets
from comm.transport.connections import SocketIn, SocketOut
from comm.transport.cross_memory import CmaIn, CmaOut
from comm.transport.wire import group_of
from lab.ranks import run_ranks
from lab.replace import replaced

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cross-memory attach is Linux's")


def cma_pair() -> tuple[CmaOut, CmaIn]:
    """Return the two ends of a connection, both in this process."""
    out, into = socket.socketpair()
    out.setblocking(False)
    into.setblocking(False)
    return CmaOut(out), CmaIn(into, os.getpid())


def close(*ends: CmaOut | CmaIn) -> None:
    for end in ends:
        end.socket.close()


def summed(cluster, numel: int = 300_000) -> tuple[type, type]:
    """Check an all-reduce, and return the kinds of this rank's connections."""
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
def test_a_connection_whose_reader_cannot_read_is_a_stream_and_the_others_stay_as_they_are(what: str):
    def one_cannot(cluster) -> tuple[type, type]:
        if cluster.rank != 1:
            return summed(cluster)
        if what == "another system":
            with replaced("comm.transport.cross_memory._vm_readv", None):
                return summed(cluster)
        readers = {"the kernel says no": refused, "another process has that id": lambda *_: 16}
        honest = cross_memory.read_memory
        calls = [readers[what]]
        with replaced(
            "comm.transport.cross_memory.read_memory",
            lambda *args: (calls.pop() if calls else honest)(*args),
        ):
            return summed(cluster)

    kinds = run_ranks(one_cannot, 3)
    right_of_1 = SocketOut if what == "another system" else CmaOut
    left_of_2 = SocketIn if what == "another system" else CmaIn
    assert kinds == [(CmaIn, SocketOut), (SocketIn, right_of_1), (left_of_2, CmaOut)]


def test_a_neighbour_that_shows_the_memory_of_a_third_process_is_not_read():
    def meet(cluster, hands_over: bool) -> int | None:
        """Connect rank 1 to rank 0, which will read. Rank 1 answers itself or lets rank 2 answer."""
        with ExitStack() as opened:
            if cluster.rank != 1:
                listener = opened.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"\0test-{secrets.token_hex(8)}")
                listener.listen()
                cluster.store.set(f"at {cluster.rank}", listener.getsockname().hex())
                end = opened.enter_context(listener.accept()[0])
                if cluster.rank == 0:
                    return cross_memory.verify(end, cross_memory.challenge(end))
                received = socket.recv_fds(end, 1, 1)[1]
                end = opened.enter_context(socket.socket(fileno=received[0]))
            else:
                places = [bytes.fromhex(cluster.store.get(f"at {rank}").decode()) for rank in (0, 2)]
                end, third = (opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in places)
                end.connect(places[0])
                third.connect(places[1])
                socket.send_fds(third, [b"x"], [(end if hands_over else third).fileno()])
            if cluster.rank == (2 if hands_over else 1):
                proof = cross_memory.prove(end)
                assert cross_memory.answer(end) is not hands_over
                del proof
        return os.getpid()

    read, left, _ = run_ranks(meet, 3, False)
    assert read == left
    assert run_ranks(meet, 3, True)[0] == 0


def named_tracers(cluster, launched: bool) -> list[int]:
    """Reduce in all ranks and in two smaller groups; return the ranks that were named as readers."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    ranks = {int(pid): rank for rank, pid in enumerate(pids)}
    named: list[int] = []
    with (
        replaced("comm.transport.cross_memory._name_tracer", named.append),
        replaced("comm.transport.cross_memory._is_launched", lambda: launched),
    ):
        for group in (
            None,
            [dist.new_group(members) for members in ([0, 2], [1, 3])][cluster.rank % 2],
            None,
        ):
            all_reduce(torch.ones(3), pattern="cma", group=group)
    return [ranks.get(pid, -1 if pid == os.getppid() else -2) for pid in named]


def test_a_rank_names_its_reader_to_a_strict_kernel_and_its_launcher_where_there_are_several():
    assert run_ranks(named_tracers, 4, True) == [[1, -1], [2, -1], [3, -1], [0, -1]]
    assert run_ranks(named_tracers, 4, False) == [[1], [2], [3], [0]], (
        "never the shell of ranks started by hand"
    )


def test_what_leaves_arrives_in_order_whether_it_is_read_or_sent():
    sizes = random.Random(0).choices(
        [1, 100, cross_memory._INLINE_BYTES, cross_memory._INLINE_BYTES + 1, 1 << 20], k=200
    )
    sent = [bytearray(random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
    out, into = cma_pair()
    queue, arrived = deque(memoryview(data) for data in sent), bytearray(sum(sizes))
    filled = 0
    while filled < len(arrived) or queue or out.is_busy:
        out.push(queue)
        filled += into.receive(memoryview(arrived)[filled : filled + 300_000])
    assert arrived == b"".join(sent)
    close(out, into)


def test_a_sender_is_not_done_before_all_of_its_memory_has_been_read():
    out, into = cma_pair()
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
    out, into = cma_pair()
    out.push(deque([memoryview(bytearray(1 << 20))]))
    out.socket.close()
    with pytest.raises(ConnectionError):
        into.receive(memoryview(bytearray(1 << 20)))
    close(into)


def test_a_dead_sender_is_distinguished_from_a_slow_one():
    out, into = cma_pair()
    assert into.receive(memoryview(bytearray(10))) == 0
    out.socket.close()
    with pytest.raises(ConnectionError):
        into.receive(memoryview(bytearray(10)))
    close(into)
