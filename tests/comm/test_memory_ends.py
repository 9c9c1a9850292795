"""Messages through shared memory arrive as they were sent, and a rank that sleeps is woken."""

import os
import random
import select
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from comm.transport import memory_ends, segment
from comm.transport.memory_ends import MemoryIn, MemoryOut, drain
from comm.transport.segment import (
    HEAD,
    NUM_READ,
    RECEIVER_SLEEPS,
    RING_BYTES,
    SENDER_SLEEPS,
    TAIL,
)
from comm.transport.stream_wire import bytes_of
from lab.replace import replaced

pytestmark = pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")


LARGE_BYTES = 1 << 15  # less than it is, so that the tests take less time


class Sent:
    done = False


@contextmanager
def pair(reads: bool):
    """Return both ends of a connection in this process. `reads`: the receiver reads the sender's memory."""
    shared, descriptor = segment.create()
    ours, theirs = socket.socketpair()
    with ours, theirs, replaced("comm.transport.memory_ends.LARGE_BYTES", LARGE_BYTES):
        ours.setblocking(False)
        theirs.setblocking(False)
        out = MemoryOut(ours, shared)
        yield out, MemoryIn(theirs, segment.attach(descriptor), os.getpid() if reads else 0)


class WatchedWords:
    """The words of a segment, which tell `stored` and `loaded` of each access to a word."""

    def __init__(
        self,
        end: MemoryIn | MemoryOut,
        stored: Callable[[int], object],
        loaded: Callable[[int], object] = lambda word: None,
    ) -> None:
        self._words, self._stored, self._loaded = end._words, stored, loaded
        end._words = self

    def __getitem__(self, word: int) -> int:
        self._loaded(word)
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value
        self._stored(word)


def pattern(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def fetch(into: MemoryIn, numel: int, out: MemoryOut) -> torch.Tensor:
    got, filled = torch.zeros(numel, dtype=torch.uint8), 0
    while filled < numel:
        is_pushed = out.push()
        num_bytes = into.receive(bytes_of(got)[filled:], numel)
        filled += num_bytes
        assert is_pushed or num_bytes, f"{filled} of {numel} bytes have arrived, and nothing moves any more"
        shown, is_same = into._words[TAIL], into._words[TAIL] == into._tail
        assert is_same, f"after a receive words[TAIL] is {shown} and self._tail is {into._tail}"
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
        for number, tensor in enumerate(sent):
            is_right = torch.equal(fetch(into, len(tensor), out), tensor)
            assert is_right, f"message {number}, of {len(tensor)} bytes, is not as it was sent"
        out.push()
        assert all(transfer.done for transfer in transfers) and not out.is_busy


def test_a_message_that_goes_over_the_end_of_the_ring_buffer_goes_on_at_its_beginning():
    with pair(reads=False) as (out, into):
        message = torch.arange(1, 11, dtype=torch.uint8)
        for fits in range(len(message) - 1, 0, -1):  # bytes of the message before the end of the buffer
            filler = torch.zeros(RING_BYTES - fits - out._head % RING_BYTES, dtype=torch.uint8)
            for tensor in (filler, message):
                out.post(bytes_of(tensor), Sent())
            fetch(into, len(filler), out)
            got = fetch(into, len(message), out).tolist()
            assert got == message.tolist(), f"{fits} of 10 bytes fit before the end of the ring buffer: {got}"


def test_space_in_the_ring_buffer_is_free_only_after_its_bytes_were_copied():
    with pair(reads=False) as (out, into):
        first, second = pattern(RING_BYTES, 0), pattern(RING_BYTES, 1)
        for tensor in (first, second):
            out.post(bytes_of(tensor), Sent())
        WatchedWords(into, lambda word: out.push() if word == TAIL else None)  # as fast as a sender can be
        for number, tensor in enumerate((first, second), start=1):
            is_right = torch.equal(fetch(into, RING_BYTES, out), tensor)
            assert is_right, f"message {number} was overwritten before the receiver had copied it"


def test_a_sender_gets_its_memory_back_only_after_the_receiver_has_read_all_of_it():
    with pair(reads=True) as (out, into):
        tensor, transfer = pattern(3 * memory_ends.PIECE_BYTES, 0), Sent()
        sent = tensor.clone()

        def use_again(word: int) -> None:
            out.push()
            if transfer.done:
                tensor.zero_()

        WatchedWords(into, use_again)
        out.post(bytes_of(tensor), transfer)
        is_right = torch.equal(fetch(into, len(tensor), out), sent)
        assert is_right, "the sender has used its memory again before the receiver had read it"


class NotedLock:
    """A lock that notes its use. Python's only fence is to take one."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def __enter__(self) -> None:
        if self._events[-1:] != ["fence"]:  # one fence takes it twice
            self._events.append("fence")

    def __exit__(self, *_: object) -> None:
        pass

    def locked(self) -> bool:
        return False


def test_a_rank_makes_its_counter_visible_before_it_looks_whether_the_other_one_sleeps():
    events: list[str] = []

    def note(end: MemoryIn | MemoryOut, counter: int, flag: int) -> None:
        WatchedWords(
            end,
            lambda word: events.append("move the counter") if word == counter else None,
            lambda word: events.append("look whether it sleeps") if word == flag else None,
        )

    for reads in (False, True):
        with pair(reads) as (out, into), replaced("comm.transport.segment._lock", NotedLock(events)):
            note(out, HEAD, RECEIVER_SLEEPS)
            note(into, NUM_READ if reads else TAIL, SENDER_SLEEPS)
            tensor, right = pattern(LARGE_BYTES, 0), ["move the counter", "fence", "look whether it sleeps"]
            events.clear()
            out.post(bytes_of(tensor), Sent())
            out.push()
            is_once = events.count("move the counter") == 1
            assert is_once, f"one push moves the counter once, but there is {', '.join(events)}"
            assert events == ["fence", *right], f"the move must be visible before the look: {events}"
            events.clear()
            into.receive(bytes_of(tensor), len(tensor))
            frees = events[events.index("move the counter") :] if "move the counter" in events else []
            assert frees == right, "what is freed must be visible before the look"


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
