"""Simulate clocks that advance only when their rank sleeps, so that a busy machine changes no time."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def simulated_time() -> Iterator[None]:
    """Let this rank's clock advance by its sleeps only, for slow links, spans and measurements.

    Ranks with equal links then have equal clocks, because each sleeps as long as the others.
    """
    ns = 0

    def now() -> int:
        return ns

    def sleep(seconds: float) -> None:
        nonlocal ns
        ns += round(seconds * 1e9)

    with (
        mock.patch("time.perf_counter_ns", now),
        mock.patch("lab.trace.timeline.now", now),
        mock.patch("time.sleep", sleep),
    ):
        yield
