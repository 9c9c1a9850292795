"""A slow link without root: every collective takes at least as long as it would on a link of chosen speed.

      real link   |== header ==|======== payload at 1 Gbit/s ========|
      here        |== header ==|= payload =|......... sleep .........|

The clock starts when all ranks have posted the collective and the link is free: on a real one nobody's
bytes move before either. The payload then moves at this machine's own speed, and what is left of the
time that the alpha-beta model gives (comm.cost) is slept away on the communication thread. So the
processors are as free as behind a real network card, and what a technique hides stays hidden.

A plain message (comm.point_to_point) brings the time along at which it would arrive: when its sender has
posted it, the sender's link is free, and alpha + bytes * beta have passed. Its receiver sleeps until then.

A machine slower than the link cannot be sped up. And there is one link for each group: two groups that
would share a network card do not slow each other down.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from comm import cost
from comm.cost import Link
from comm.transport.work_queue import GroupQueue
from lab import timeline, units
from lab.errors import WorkbookError

_link: Link | None = None


def parse(text: str) -> Link:
    """A link from its rate and, perhaps, its latency: "1gbit" or "1gbit,0.2ms"."""
    rate, comma, latency = text.partition(",")
    try:
        beta = 1 / units.bytes_per_second(rate)
        return Link(units.seconds(latency) if comma else 0.0, beta)
    except WorkbookError as error:
        raise WorkbookError(f"--link {text}: {error} (a link is a rate, or rate,latency).") from error


def use(link: Link | None) -> None:
    """Slow all collectives of this process down from here on; None for no longer."""
    global _link
    _link = link


def current() -> Link | None:
    """The link in use, if any."""
    return _link


@contextmanager
def slowed(link: Link | None) -> Iterator[None]:
    """Slow down what happens in the block."""
    before = _link
    use(link)
    try:
        yield
    finally:
        use(before)


class LinkDelay:
    """The time one collective owes the link of its group, if there is one.

    All ranks reckon from the same start: when the last of them had posted the collective, and its link
    had nothing else to carry. So a late wake-up of a thread is not charged again to what waits behind it.
    """

    def __init__(self, queue: GroupQueue, posted: int, op: str, pattern: str, num_bytes: int, ranks: int):
        self._queue, self._cost, self.ready = queue, 0, 0
        if _link is not None:
            seconds = cost.seconds(op, cost.model_of(op, pattern), num_bytes, ranks, _link)
            self._cost, self.ready = int(seconds * 1e9), max(posted, queue.link_free_at)
        self._start = self.ready

    def start(self, ready: int) -> None:
        """All ranks are here, and the last one was ready then."""
        # Not in the future: machines with clocks of their own may call anything by that name.
        self._start = min(ready, time.perf_counter_ns())

    def wait(self) -> None:
        """Sleep until the link would be done."""
        if self._cost:
            self._queue.link_free_at = end = self._start + self._cost
            time.sleep(max(0, end - time.perf_counter_ns()) / 1e9)


def arrival(queue: GroupQueue, num_bytes: int) -> int:
    """When a message of so many bytes, posted now, arrives: nanoseconds. It keeps the sender's link busy,
    but for its latency. Only with a link in use."""
    assert _link is not None
    departs = max(time.perf_counter_ns(), queue.link_free_at)
    queue.link_free_at = departs + int(num_bytes * _link.beta * 1e9)
    return queue.link_free_at + int(_link.alpha * 1e9)


def wait_for_arrival(at: int, num_bytes: int) -> None:
    """Sleep until a message has arrived, as its sender says; call it once the bytes are here."""
    if _link is not None:
        now, takes = time.perf_counter_ns(), int((_link.alpha + num_bytes * _link.beta) * 1e9)
        # As if it had left just now, at the latest: machines with clocks of their own may say anything.
        at = min(at, now + takes)
        time.sleep(max(0, at - now) / 1e9)
        timeline.record("message", "communication", at - takes, at, lane="communication", bytes=num_bytes)
