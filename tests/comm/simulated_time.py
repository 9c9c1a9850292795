"""Clocks that stand still but when their rank sleeps, so that no busy machine adds to what a link takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def simulated_time() -> Iterator[None]:
    """Let this rank's clock, as slow links, spans and measurements read it, go on by its sleeps alone.

    Ranks whose links are equal then have equal clocks: each sleeps as long as the others.
    """
    ns = 0

    def now() -> int:
        return ns

    def sleep(seconds: float) -> None:
        nonlocal ns
        ns += round(seconds * 1e9)

    with (
        mock.patch("time.perf_counter_ns", now),
        mock.patch("lab.timeline.now", now),
        mock.patch("time.sleep", sleep),
    ):
        yield
