"""Messages leave as far as the kernel takes them, and arrive as one stream of bytes, without waiting."""

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from comm import collectives
from comm.transport.choice import CAN_POLL, use_transport
from comm.transport.stream_ends import StreamIn, StreamOut
from lab.check import assert_same
from lab.ranks import run_ranks

pytestmark = pytest.mark.skipif(not CAN_POLL, reason="the transports poll sockets")

MOST_PUSHES = 1000
SIZES = (1, 70_000, 7, 3, *[5] * 30, 200_000, 1)


class Sent:
    done = False


class NeverWaits(socket.socket):
    """A socket of a rank that must not wait, neither in the kernel nor in a loop: that is an error here."""

    num_moved = refusals = 0

    def sendall(self, *_: object) -> None:
        raise AssertionError("`sendall` waits until all bytes have left, or loses count of those that have")

    def setblocking(self, blocks: bool) -> None:
        assert not blocks, "a socket that blocks waits for the other rank, which may wait for this one"
        super().setblocking(False)

    def send(self, *arguments: object) -> int:
        return self._counted(super().send, *arguments)

    def sendmsg(self, *arguments: object) -> int:
        return self._counted(super().sendmsg, *arguments)

    def recv_into(self, *arguments: object) -> int:
        return self._counted(super().recv_into, *arguments)

    def _counted(self, call: Callable[..., int], *arguments: object) -> int:
        try:
            num_bytes = call(*arguments)
        except BlockingIOError:
            self.refusals += 1
            asked = f"the kernel was asked {self.refusals} times without success"
            if self.refusals == 100:
                raise AssertionError(f"{asked}: return, and let the caller look at other messages") from None
            raise
        self.refusals, self.num_moved = 0, self.num_moved + num_bytes
        return num_bytes


@contextmanager
def pair() -> Iterator[tuple[NeverWaits, NeverWaits]]:
    """Return both ends of a connection that holds a few kB, and does not block."""
    ours, theirs = (NeverWaits(fileno=end.detach()) for end in socket.socketpair())
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            end.setblocking(False)
        yield ours, theirs


def posted(out: StreamOut) -> tuple[bytes, list[Sent]]:
    """Post messages of several sizes. Return their bytes, and their transfers."""
    messages = [random.Random(i).randbytes(size) for i, size in enumerate(SIZES)]
    transfers = [Sent() for _ in messages]
    for message, transfer in zip(messages, transfers, strict=True):
        out.post(memoryview(message), transfer)
    return b"".join(messages), transfers


def taken_from(end: socket.socket) -> bytes:
    taken = bytearray()
    try:
        while data := end.recv(1 << 20):
            taken += data
    except BlockingIOError:
        pass
    return bytes(taken)


def test_what_the_kernel_does_not_take_at_once_leaves_later_and_in_order():
    with pair() as (ours, theirs):
        out = StreamOut(ours)
        sent, _ = posted(out)
        got = b""
        for _ in range(MOST_PUSHES):
            if not out.is_busy or len(got) > len(sent):
                break
            out.push()
            got += taken_from(theirs)
        is_all = len(got) == len(sent) and not out.is_busy
        assert is_all, f"{len(sent)} bytes were posted, and {len(got)} have left"
        same = next((i for i, (a, b) in enumerate(zip(got, sent, strict=True)) if a != b), len(sent))
        assert same == len(sent), f"byte {same} of the stream is not the one that was posted there"


def test_a_message_is_done_when_the_kernel_has_its_last_byte_and_not_before():
    with pair() as (ours, theirs):
        out = StreamOut(ours)
        sent, transfers = posted(out)
        ends = [sum(SIZES[: i + 1]) for i in range(len(SIZES))]
        num_taken = 0
        for _ in range(MOST_PUSHES):
            out.push()
            num_taken += len(taken_from(theirs))
            for end, transfer in zip(ends, transfers, strict=True):
                is_right = transfer.done == (end <= num_taken)
                assert is_right, (
                    f"the kernel has {num_taken} bytes, and the message that ends at byte {end} is "
                    f"{'done' if transfer.done else 'not done'}"
                )
            if num_taken >= len(sent):
                break
        assert num_taken == len(sent), f"{len(sent)} bytes were posted, and {num_taken} have left"


def test_a_push_tells_whether_the_kernel_has_taken_anything():
    with pair() as (ours, theirs):
        out = StreamOut(ours)
        result = out.push()
        assert not result, f"a push that has nothing to send returns {result}"
        out.post(memoryview(bytes(1 << 20)), Sent())
        seen = set()
        for number in range(1, 40):
            before, result = ours.num_moved, out.push()
            takes = ours.num_moved > before
            what = "some bytes" if takes else "nothing"
            assert bool(result) == takes, f"push {number}, of which the kernel takes {what}, returns {result}"
            seen.add(takes)
            if number % 10 == 0:
                taken_from(theirs)
        assert seen == {True, False}, "the kernel has taken bytes, and at other times none"


def received(end: StreamIn, into: memoryview, right: bytes) -> None:
    """Check that one `receive` gives these bytes."""
    got = end.receive(into, 8)
    is_right = got == len(right) and bytes(into[: len(right)]) == right
    there = f"of {len(into)} bytes that fit {len(right)} can be taken"
    assert is_right, f"{there}, but `receive` returns {got}, and `into` begins with {bytes(into[:8])!r}"


def test_a_receiver_takes_what_is_there_and_does_not_wait_for_more():
    with pair() as (ours, theirs):
        end, into = StreamIn(theirs), memoryview(bytearray(8))
        received(end, into, b"")
        ours.send(b"abc")
        received(end, into, b"abc")
        ours.send(b"defgh, and the next message")
        received(end, into[3:], b"defgh")
        assert bytes(into) == b"abcdefgh", "what comes later must not overwrite what has arrived before"
        received(end, into, b", and th")


def test_a_receiver_is_told_that_its_sender_has_gone():
    with pair() as (ours, theirs):
        end, into = StreamIn(theirs), memoryview(bytearray(4))
        ours.send(b"last")
        ours.close()
        assert (end.receive(into, 4), bytes(into)) == (4, b"last"), "what was sent before still arrives"
        with suppress(OSError):
            number = end.receive(into, 4)
            raise AssertionError(f"the sender has closed the connection, and `receive` returns {number}")


def test_the_error_of_a_lost_connection_leaves_push_and_receive():
    with pair() as (ours, theirs):
        out = StreamOut(ours)
        theirs.close()
        out.post(memoryview(b"lost"), Sent())
        with suppress(OSError):
            result = out.push()
            raise AssertionError(f"the connection is lost, and `push` returns {result}")
    with pair() as (ours, theirs):
        theirs.send(b"unread")
        ours.close()  # so the kernel of the other rank says that the connection was reset
        with suppress(OSError):
            result = StreamIn(theirs).receive(memoryview(bytearray(4)), 4)
            raise AssertionError(f"the connection is lost, and `receive` returns {result}")


def test_a_tree_broadcast_and_other_patterns_run_over_sockets():
    def work(cluster) -> None:
        use_transport("sockets")
        n, rank = cluster.world_size, cluster.rank
        for numel in (3, 400_000):  # the second is more than a connection holds
            of_ranks = [torch.arange(numel, dtype=torch.float64) + 1000 * r for r in range(n)]
            for root in range(n):
                copy = of_ranks[rank].clone()
                collectives.broadcast(copy, root, pattern="tree")
                assert_same({"copy": copy}, {"copy": of_ranks[root]}, 0, "tree broadcast over sockets,")
            for pattern in ("ring", "recursive_doubling"):
                total = of_ranks[rank].clone()
                collectives.all_reduce(total, pattern=pattern)
                assert_same({"sum": total}, {"sum": sum(of_ranks)}, 0, f"{pattern} all-reduce over sockets,")

    run_ranks(work, 4)
