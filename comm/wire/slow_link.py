"""Simulate a slow link in software: every collective takes at least as long as on a link of the chosen speed.

      real link   |== header ==|======== payload at 1 Gbit/s ========|
      here        |== header ==|= payload =|......... sleep .........|

The clock starts when all ranks have posted the collective and the link is free, because on a real link no
payload moves before that. The thread that runs the collective sleeps for the rest of the time that the
alpha-beta model predicts (comm/cost.py). So the cores are as free as with a real network card. A
point-to-point message carries the time at which it would arrive, and its receiver sleeps until then.

Each group has a simulated link of its own, so two groups do not slow each other down, as they would on one
network card. `share` lets several groups share one, and `exempt` leaves a group alone that needs no network.
The simulation cannot make a link faster than the machine is.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from comm.wire.groups import Group
from comm.wire.work_queue import GroupQueue, queue_of
from lab import units
from lab.launch.errors import WorkbookError
from lab.trace import timeline


@dataclass(frozen=True)
class Link:
    """The speed of a link: alpha in seconds per message, beta in seconds per byte."""

    alpha: float
    beta: float


_link: Link | None = None


def parse(text: str) -> Link:
    """Return the link that a text describes, by its rate and perhaps its latency: "1gbit,0.2ms"."""
    rate, comma, latency = text.partition(",")
    try:
        beta = 1 / units.bytes_per_second(rate)
        return Link(units.seconds(latency) if comma else 0.0, beta)
    except WorkbookError as error:
        raise WorkbookError(f"--link {text}: {error} (a link is a rate, or rate,latency).") from error


def use(link: Link | None) -> None:
    """Simulate this link for all communication of this process from now on; None ends it."""
    global _link
    _link = link


def current() -> Link | None:
    return _link


def share(group: Group, num_groups: int) -> None:
    """Give the collectives of this group an equal part of the rate of a link that `num_groups` share."""
    queue_of(group).link_users = num_groups


def exempt(group: Group) -> None:
    """Do not slow down the collectives of this group: its ranks are on one machine."""
    queue_of(group).link_users = 0


@contextmanager
def slowed(link: Link | None) -> Iterator[None]:
    before = _link
    use(link)
    try:
        yield
    finally:
        use(before)


def link_for(queue: GroupQueue) -> Link | None:
    """Return the simulated link for the collectives of a group, or None if they are not slowed down."""
    if _link is None or not queue.link_users:
        return None
    return Link(_link.alpha, _link.beta * queue.link_users)


class LinkDelay:
    """The time that one collective takes on the simulated link of its group, if there is one.

    The link is free again at the computed end, even if the thread wakes up later. So a late wake-up does not
    add to the delay of the next operation.
    """

    def __init__(self, queue: GroupQueue, posted: int, seconds: float) -> None:
        self._queue, self._cost = queue, int(seconds * 1e9)
        self.ready = max(posted, queue.link_free_at) if self._cost else 0
        self._start = self.ready

    def start(self, ready: int) -> None:
        """Start the clock. All ranks have posted the collective, the last one at the time `ready`."""
        # Never in the future: another machine's clock may show any time.
        self._start = min(ready, time.perf_counter_ns())

    def wait(self) -> None:
        """Sleep until the simulated link would be done."""
        if self._cost:
            self._queue.link_free_at = end = self._start + self._cost
            time.sleep(max(0, end - time.perf_counter_ns()) / 1e9)


def arrival(queue: GroupQueue, num_bytes: int) -> int:
    """Return the time, in nanoseconds, at which a message that is posted now arrives.

    The message keeps the sender's link busy for bytes * beta, not for alpha. A simulated link must be in use.
    """
    assert _link is not None
    departs = max(time.perf_counter_ns(), queue.link_free_at)
    queue.link_free_at = departs + int(num_bytes * _link.beta * 1e9)
    return queue.link_free_at + int(_link.alpha * 1e9)


def wait_for_arrival(at: int, num_bytes: int) -> None:
    """Sleep until the time `at`, which the sender computed. Call it after the bytes have arrived."""
    if _link is not None:
        now, takes = time.perf_counter_ns(), int((_link.alpha + num_bytes * _link.beta) * 1e9)
        # No later than if the message left now: another machine's clock may show any time.
        at = min(at, now + takes)
        time.sleep(max(0, at - now) / 1e9)
        timeline.record("message", "communication", at - takes, at, lane="communication", bytes=num_bytes)
