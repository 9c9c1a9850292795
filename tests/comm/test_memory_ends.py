"""Messages through shared memory arrive as they were sent, and a rank that sleeps is woken."""

import os
import random
import select
import socket
import threading
from contextlib import contextmanager

import pytest
import torch

from comm.transport import memory_ends, segment
from comm.transport.memory_ends import LARGE_BYTES, MemoryIn, MemoryOut, drain
from comm.transport.segment import RING_BYTES
from comm.transport.stream_wire import bytes_of

pytestmark = pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")


class Sent:
    done = False


@contextmanager
def pair(reads: bool):
    """Return both ends of a connection in this process. `reads`: the receiver reads the sender's memory."""
    shared, descriptor = segment.create()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        out = MemoryOut(ours, shared)
        yield out, MemoryIn(theirs, segment.attach(descriptor), os.getpid() if reads else 0)


def pattern(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def fetch(into: MemoryIn, numel: int, out: MemoryOut) -> torch.Tensor:
    got, filled = torch.zeros(numel, dtype=torch.uint8), 0
    while filled < numel:
        out.push()
        filled += into.receive(bytes_of(got)[filled:], numel)
    return got


@pytest.mark.parametrize("reads", [True, False])
def test_messages_of_all_sizes_arrive_bit_by_bit_and_in_order(reads: bool):
    source = random.Random(3)
    sizes = [1, 7, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, RING_BYTES - 1, RING_BYTES, RING_BYTES + 1]
    sizes += [
        source.choice((source.randrange(1, 200), source.randrange(1, 3 * RING_BYTES))) for _ in range(60)
    ]
    with pair(reads) as (out, into):
        sent = [pattern(size, seed) for seed, size in enumerate(sizes)]
        transfers = [Sent() for size in sizes]
        for tensor, transfer in zip(sent, transfers, strict=True):
            out.post(bytes_of(tensor), transfer)
        for tensor in sent:
            assert torch.equal(fetch(into, len(tensor), out), tensor)
        out.push()
        assert all(transfer.done for transfer in transfers) and not out.is_busy


def test_a_large_message_is_done_only_when_it_was_read():
    with pair(reads=True) as (out, into):
        tensor, transfer = pattern(4 * LARGE_BYTES, 0), Sent()
        out.post(bytes_of(tensor), transfer)
        out.push()
        assert out.is_busy and not transfer.done
        assert torch.equal(fetch(into, len(tensor), out), tensor)
        out.push()
        assert transfer.done and not out.is_busy


def test_a_message_that_its_receiver_cannot_read_waits_for_room_in_the_buffer():
    with pair(reads=False) as (out, into):
        tensor, transfer = pattern(2 * RING_BYTES, 1), Sent()
        out.post(bytes_of(tensor), transfer)
        assert out.push() and not out.push() and not transfer.done
        assert torch.equal(fetch(into, len(tensor), out), tensor)
        assert transfer.done


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_a_rank_that_says_it_sleeps_is_woken_and_another_one_is_not(who: str):
    with pair(reads=True) as (out, into):
        drain(out.socket)  # the receiver has told the sender that it can read
        asleep, other = (into, out) if who == "receiver" else (out, into)
        tensor = pattern(2 * LARGE_BYTES, 2)
        for sleeps in (False, True):
            out.post(bytes_of(tensor), Sent())
            if who == "sender":
                out.push()
            asleep.sleep(sleeps)
            if who == "receiver":
                out.push()
            fetch(into, len(tensor), out)
            woken = bool(select.select([asleep.socket], [], [], 0)[0])
            assert woken == sleeps
            out.push()
        assert drain(asleep.socket) and other is not asleep


def test_a_sender_that_has_gone_is_an_error_and_not_garbage():
    with pair(reads=True) as (out, into):
        tensor = pattern(8 * memory_ends.PIECE_BYTES, 3)
        out.post(bytes_of(tensor), Sent())
        out.push()
        got = torch.zeros_like(tensor)
        assert into.receive(bytes_of(got), len(tensor)) == memory_ends.PIECE_BYTES
        out.socket.close()
        with pytest.raises(ConnectionError, match="it closed the connection"):
            into.receive(bytes_of(got)[memory_ends.PIECE_BYTES :], len(tensor))
        assert not drain(into.socket)


def test_two_threads_that_sleep_and_wake_each_other_lose_no_message():
    """Each sleeps after every message. With a fence or a look too few one of them would not be woken."""
    rounds = 3000
    with pair(reads=False) as (out, into):
        failed = []

        def receive() -> None:
            got = torch.zeros(8, dtype=torch.uint8)
            for number in range(rounds):
                filled = 0
                while filled < 8:
                    step = into.receive(bytes_of(got)[filled:], 8)
                    filled += step
                    if not step:
                        into.sleep(True)
                        segment.fence()
                        filled += into.receive(bytes_of(got)[filled:], 8)
                        if filled < 8 and not select.select([into.socket], [], [], 5)[0]:
                            failed.append(number)
                            return
                        into.sleep(False)
                        drain(into.socket)
                if int(got[0]) != number % 251:
                    failed.append(number)
                    return

        thread = threading.Thread(target=receive)
        thread.start()
        for number in range(rounds):
            transfer = Sent()
            message = torch.full((8,), number % 251, dtype=torch.uint8)
            out.post(bytes_of(message), transfer)
            while not transfer.done:
                out.push()
        thread.join(20)
        assert not failed and not thread.is_alive()
