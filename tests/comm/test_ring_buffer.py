"""A receiver takes bytes out of a ring buffer in an order that also holds on another processor."""

import pytest

from comm.transport import segment
from comm.transport.segment import HEAD, SENDER_SLEEPS, TAIL
from lab.replace import replaced
from tests.comm.test_memory_ends import NotedLock, Sent, WatchedWords, pair

pytestmark = pytest.mark.skipif(not segment.is_possible(), reason="the segments are Linux's")


class WatchedPlace:
    """The place of a message, which notes each copy into it."""

    def __init__(self, place: memoryview, events: list[str]) -> None:
        self._place, self._events = place, events

    @property
    def nbytes(self) -> int:
        return len(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, part: slice) -> "WatchedPlace":
        return WatchedPlace(self._place[part], self._events)

    def __setitem__(self, part: slice, data: memoryview) -> None:
        self._place[part] = data
        self._events.append("copy")


def test_a_receiver_copies_after_it_has_looked_and_frees_after_it_has_copied():
    events: list[str] = []
    with pair(reads=False) as (out, into), replaced("comm.transport.segment._lock", NotedLock(events)):
        WatchedWords(
            into,
            lambda word: events.append("store TAIL") if word == TAIL else None,
            lambda word: events.append("load HEAD") if word == HEAD else None,
        )
        place = memoryview(bytearray(8))
        out.post(memoryview(b"12345678"), Sent())
        out.push()
        events.clear()
        got = into.receive(WatchedPlace(place, events), 8)  # type: ignore[arg-type]
        assert (got, bytes(place)) == (8, b"12345678"), f"8 bytes are there, and `_take` returns {got}"
        copies = [number for number, event in enumerate(events) if event == "copy"]
        looks = [number for number, event in enumerate(events[: copies[0]]) if event == "load HEAD"]
        is_before = "fence" in events[looks[-1] : copies[0]]
        is_after = "fence" in events[copies[-1] : events.index("store TAIL")]
        assert is_before, f"no fence between the look and the copy: {', '.join(events)}"
        assert is_after, f"no fence between the copy and the store: {', '.join(events)}"


def test_a_receiver_with_nothing_to_take_stores_nothing_and_wakes_no_rank():
    events: list[str] = []
    with pair(reads=False) as (_, into):
        WatchedWords(
            into,
            lambda word: events.append(f"store word {word}"),
            lambda word: events.append("look whether it sleeps") if word == SENDER_SLEEPS else None,
        )
        got = into.receive(memoryview(bytearray(8)), 8)
        assert got == 0, f"the ring buffer is empty, and `_take` returns {got}"
        assert not events, f"the ring buffer is empty, and `_take` does this: {', '.join(events)}"
