"""A slow link without root: every collective takes at least as long as it would on a link of chosen speed.

      real link   |== header ==|======== payload at 1 Gbit/s ========|
      here        |== header ==|= payload =|......... sleep .........|

The clock starts when all ranks are there: on a real link nobody's bytes move before either. The payload
then moves at this machine's own speed, and what is left of the time that the alpha-beta model gives
(comm.cost) is slept away on the communication thread. So the processors are as free as behind a real
network card, and what a technique hides stays hidden.

A machine slower than the link cannot be sped up. And there is one link for each group: two groups that
would share a network card do not slow each other down.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from comm import cost
from comm.cost import Link
from lab import units
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


class Toll:
    """The time one collective owes the link, from `begin()` to the return of `pay()`."""

    def __init__(self, op: str, pattern: str, num_bytes: int, ranks: int) -> None:
        self._seconds = 0.0
        if _link is not None:
            self._seconds = cost.seconds(op, cost.model_of(op, pattern), num_bytes, ranks, _link)
        self.begin()

    def begin(self) -> None:
        """All ranks are here."""
        self._began = time.perf_counter()

    def pay(self) -> None:
        """Sleep until the link would be done."""
        left = self._seconds - (time.perf_counter() - self._began)
        if left > 0:
            time.sleep(left)
