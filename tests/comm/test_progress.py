"""A rank that waits for one message moves all of its others, whatever becomes of one of its peers."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from comm import collectives
from comm.transport import segment
from comm.transport.choice import CAN_POLL, use_transport
from comm.transport.segment import HEAD, RECEIVER_SLEEPS
from comm.transport.stream_ends import StreamIn, StreamOut
from comm.transport.stream_wire import bytes_of
from comm.transport.streams import Peer, Streams
from lab.ranks import run_ranks
from lab.replace import replaced
from tests.comm.test_memory_ends import NotedLock, Sent, WatchedWords, pair

pytestmark = pytest.mark.skipif(not CAN_POLL, reason="the transports poll sockets")


def test_two_ranks_that_send_each_other_more_than_fits_on_the_way_both_go_on():
    """No buffer on the way holds such a message: the ring buffer has 1 MiB, and a socket some MB."""

    def swap(cluster) -> None:
        for transport, numel in (("auto", 1_000_000), ("sockets", 8_000_000)):
            use_transport(transport)
            mine, got = torch.full((numel,), float(cluster.rank)), torch.empty(numel)
            collectives.all_to_all(got, mine)
            first, second = got.chunk(2)
            assert (first == 0).all() and (second == 1).all(), transport

    run_ranks(swap, 2, timeout=3)


class NoListener:
    def sockets(self) -> list[socket.socket]:
        return []

    def accept(self) -> list[object]:
        return []


def streams_to(*peers: Peer) -> Streams:
    """Return the streams of a rank that has connections to these peers, and no group."""
    made = object.__new__(Streams)
    made._all, made._listener, made._is_local, made._deadline = list(peers), NoListener(), True, 1.0
    made._lock, made._a_thread_sleeps, made._bell = threading.Lock(), False, socket.socketpair()
    made._lock.acquire()
    return made


@contextmanager
def peer_over_sockets(rank: int) -> Iterator[tuple[Peer, StreamOut, StreamIn]]:
    """Return a peer, and both of that peer's own ends."""
    with ExitStack() as stack:
        ends = [stack.enter_context(end) for _ in range(2) for end in socket.socketpair()]
        for end in ends:
            end.setblocking(False)
        peer = Peer(rank, rank)
        peer.out, peer.incoming = StreamOut(ends[0]), StreamIn(ends[2])
        yield peer, StreamOut(ends[3]), StreamIn(ends[1])


def message(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def test_one_move_serves_all_peers_and_tells_whether_anything_has_moved():
    with peer_over_sockets(1) as (first, first_out, first_in), peer_over_sockets(2) as (second, out, into):
        moving, got = streams_to(first, second), [message(bytes(5)) for _ in range(4)]
        arrived = [Sent() for _ in range(2)]
        assert_nothing_moves(moving, "nothing was posted")
        is_kept = moving._deadline == 1.0
        assert is_kept, f"nothing has moved, and `_deadline` was 1.0 and is {moving._deadline} now"
        for peer, theirs, transfer, place in zip(
            (first, second), (first_out, out), arrived, got, strict=False
        ):
            peer.out.post(message(b"to %d " % peer.rank), Sent())
            peer.posted.append((place, transfer))
            theirs.post(message(b"from%d" % peer.rank), Sent())
            theirs.push()
        moved = moving._move()
        assert moved, f"messages have moved, and `_move` returns {moved}"
        assert_begins_again(moving)
        assert [first_in.receive(got[2], 5), into.receive(got[3], 5)] == [5, 5], "a message was not sent"
        is_received = [bytes(one) for one in got] == [b"from1", b"from2", b"to 1 ", b"to 2 "]
        assert is_received and all(transfer.done for transfer in arrived), "a message was not received"
        assert_nothing_moves(moving, "all that could move has moved before")


def assert_nothing_moves(moving: Streams, why: str) -> None:
    moved = moving._move()
    assert not moved, f"{why}, and `_move` returns {moved}"


def assert_begins_again(moving: Streams) -> None:
    is_set = moving._deadline == 0.0
    assert is_set, f"something has moved, and `_deadline` is {moving._deadline}, and not 0.0"


def fill(out: StreamOut) -> None:
    """Post a message that leaves in part, and of which the kernel takes no more now."""
    out.post(message(bytes(1 << 22)), Sent())
    while out.push():
        pass


def test_one_message_to_or_from_any_rank_is_a_movement():
    for way in ("to", "from"):
        for rank in (1, 2):
            with peer_over_sockets(1) as first, peer_over_sockets(2) as second:
                moving, (peer, theirs, _) = streams_to(first[0], second[0]), (first, second)[rank - 1]
                fill((first, second)[2 - rank][0].out)
                if way == "to":
                    peer.out.post(message(b"one"), Sent())
                else:
                    peer.posted.append((message(bytes(3)), Sent()))
                    theirs.post(message(b"one"), Sent())
                    theirs.push()
                moved = moving._move()
                assert moved, f"only a message {way} rank {rank} could move, and `_move` returns {moved}"
                assert_begins_again(moving)
                assert_nothing_moves(moving, "all that could move has moved before")


def test_a_peer_to_which_nothing_was_ever_sent_stops_no_other_message():
    with peer_over_sockets(2) as (peer, theirs, _):
        untouched, transfer = Peer(1, 1), Sent()
        peer.posted.append((message(bytes(3)), transfer))
        theirs.post(message(b"one"), Sent())
        theirs.push()
        assert streams_to(untouched, peer)._move() and transfer.done, "a message of rank 2 has not arrived"
        assert not untouched.has_left, "rank 1 has not left: there is no connection to it yet"


def test_a_peer_that_is_found_to_have_left_is_a_movement_once():
    with peer_over_sockets(1) as (left, _, into):
        moving = streams_to(left)
        into.close()
        left.out.post(message(b"lost"), Sent())
        moved = moving._move()
        assert left.has_left, "rank 1 has left, and its `has_left` is not set"
        assert moved, f"rank 1 is found to have left, and `_move` returns {moved}"
        assert_begins_again(moving)
        assert_nothing_moves(moving, "a peer that has left moves nothing")


def test_any_error_of_a_connection_says_that_the_peer_has_left():
    with peer_over_sockets(1) as (lost, _, _), peer_over_sockets(2) as (other, _, into):
        lost.pull = raise_no_route
        other.out.post(message(b"one"), Sent())
        streams_to(lost, other)._move()
        assert lost.has_left, "rank 1 cannot be reached, and its `has_left` is not set"
        assert into.receive(message(bytes(3)), 3) == 3, "a message was not sent"


def raise_no_route() -> bool:
    raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def test_a_peer_that_has_left_stops_no_other_message_and_what_it_had_sent_arrives():
    with peer_over_sockets(1) as (left, out, into), peer_over_sockets(2) as (other, other_out, _):
        moving, got, arrived = streams_to(left, other), [message(bytes(4)) for _ in range(3)], Sent()
        out.post(message(b"last"), Sent())
        out.push()
        out.close()
        into.close()
        left.out.post(message(b"lost"), Sent())  # to a peer that has gone: an error
        left.posted.extend(((got[0], Sent()), (got[1], Sent())))
        other.posted.append((got[2], arrived))
        for _ in range(3):
            moving._move()
        assert left.has_left and not other.has_left
        assert bytes(got[0]) == b"last", "a message of rank 1 has not arrived, which it sent before it left"
        other_out.post(message(b"more"), Sent())
        other_out.push()
        for _ in range(2):
            moving._move()
        assert arrived.done, "a message of rank 2 has not arrived, because rank 1 has left"
        assert bytes(got[2]) == b"more"
        assert_nothing_moves(moving, "a peer that has left moves nothing")


@pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")
def test_a_rank_says_that_it_sleeps_before_it_looks_for_messages_once_more():
    events: list[str] = []
    with (
        pair(reads=False) as (out, into),
        replaced("comm.transport.segment._lock", NotedLock(events)),
    ):
        peer = Peer(1, 1)
        peer.incoming = into
        place = torch.zeros(4, dtype=torch.uint8)
        peer.posted.append((bytes_of(place), Sent()))
        WatchedWords(
            into,
            lambda word: events.append("say it") if word == RECEIVER_SLEEPS else None,
            lambda word: events.append("look") if word == HEAD else None,
        )
        streams_to(peer)._sleep(0.001)
        is_seen = events[:3] == ["say it", "fence", "look"]
        assert is_seen, f"what a rank says must be visible before the look, but there is {events}"
        out.post(message(bytes((1, 1, 1, 1))), Sent())
        out.push()
        streams_to(peer)._sleep(1000.0)  # which does not sleep, because there is a message
        assert place.tolist() == [1, 1, 1, 1] and not peer.posted
