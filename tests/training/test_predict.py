"""A step's predicted time: its computing, and what the link sends after that."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from comm import cost
from comm.cost import Link
from comm.wire import slow_link
from lab.ranks import run_ranks
from lab.trace.gantt import Event
from lab.trace.ledger import Entry, Traffic
from training.calibrate import TINY_BYTES, measure_all_reduce, measure_flops
from training.predict import observed_step, predicted_seconds, step_seconds

SECOND = 1_000_000_000


def wire(num_bytes: int) -> float:
    """Return the seconds of a message: one for the message and one for every 10 bytes."""
    return 1.0 + num_bytes / 10


def event(kind: str, start: float, end: float, lane: str = "main", num_bytes: int | None = None) -> Event:
    """Make an event that lasts from `start` to `end`, in seconds."""
    args = {} if num_bytes is None else {"bytes": num_bytes}
    return Event(kind, kind, int(start * SECOND), int((end - start) * SECOND), lane, args)


def launch(at: float) -> Event:
    return event("launch", at, at + 0.01, "launches")


def sent(start: float, end: float, num_bytes: int, lane: str = "communication") -> Event:
    return event("communication", start, end, lane, num_bytes)


@pytest.mark.parametrize(
    ("compute", "messages", "seconds"),
    [
        (6.0, [], 6 + 1),
        (6.0, [(6.0, 10), (6.0, 20)], 6 + 2 + 3 + 1),  # ready at the end: all of it costs time
        (6.0, [(1.0, 10), (3.0, 10)], 6 + 1),  # ended during compute: it costs nothing
        (6.0, [(1.0, 40), (2.0, 10), (6.0, 0)], (1 + 5 + 2 + 1) + 1),  # one begins when another has ended
        (8.0, [(1.0, 0), (7.0, 10)], (7 + 2) + 1),  # the link idles until it is ready
    ],
)
def test_a_step_takes_its_computing_and_what_is_not_hidden(compute, messages, seconds):
    assert step_seconds(compute, 1.0, messages, wire) == seconds


OVERLAPPED = [
    event("forward", 10, 11),
    event("backward", 11, 14),
    launch(12),
    launch(13.5),
    sent(12.1, 13, 40),
    sent(13.5, 15.5, 80),
    event("wait", 14, 15.5),
    event("optimizer", 15.5, 16.5),
    sent(17, 17.5, 8, "main"),  # the loss
]


def test_a_message_is_ready_at_its_launch_or_else_at_the_end_and_the_loss_does_not_count():
    assert observed_step(OVERLAPPED) == (4.0, 1.0, [(2.0, 40), (3.5, 80)])
    assert observed_step(OVERLAPPED[::-1]) == observed_step(OVERLAPPED)
    naive = [
        event("forward", 0, 1),
        event("backward", 1, 4),
        sent(4, 5, 10, "main"),
        event("optimizer", 6, 7),
    ]
    assert observed_step(naive) == (4.0, 1.0, [(4.0, 10)])


def test_communication_inside_the_backward_and_gaps_between_microbatches_are_no_compute():
    events = [event("forward", 0, 1), event("backward", 1, 6), event("optimizer", 6, 7)]
    assert observed_step([*events, sent(2, 3, 10, "main")]) == (5.0, 1.0, [(5.0, 10)])
    assert observed_step([*events, launch(3), sent(3, 6, 10), event("wait", 4, 6)]) == (4.0, 1.0, [(3.0, 10)])
    events = [event("forward", 0, 1), event("backward", 1, 2), event("forward", 5, 6)]
    events += [event("backward", 6, 8), event("optimizer", 8, 9)]
    assert observed_step([*events, launch(7), sent(7, 8, 10)])[2] == [(4.0, 10)]


def test_the_prediction_of_a_run_is_the_median_of_its_steps():
    steps = [[event("backward", 0, seconds)] for seconds in (1, 9, 2)]
    link, two = Link(0.5, 0.1), {Entry("all_reduce", "ring"): Traffic(2, 1)}

    def predicted(steps: list[list[Event]], traffic: dict[Entry, Traffic] = two) -> float | None:
        return predicted_seconds(steps, traffic, "ring", 2, link)

    assert predicted(steps) == pytest.approx(2.0)
    assert predicted([]) is None
    assert predicted(steps, two | {Entry("all_to_all", "pairwise"): Traffic(2, 1)}) is None
    messages = observed_step(OVERLAPPED)
    assert predicted([OVERLAPPED]) == step_seconds(
        *messages, lambda size: cost.seconds("all_reduce", "ring", size, 2, link)
    )


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


@pytest.mark.parametrize("link", [Link(1e-4, 8e-6), Link(0.05, 1 / 12.5e6)])
def test_a_slow_link_is_measured_in_seconds_and_alike_on_all_ranks(link: Link):
    def measured(cluster) -> tuple[float, Link]:
        with simulated_time(), slow_link.slowed(link):
            found = measure_all_reduce("ring")
            return time.perf_counter_ns() / 1e9, found

    (seconds, found), *others = run_ranks(measured, 2)
    assert all(other == found for _, other in others)
    assert seconds < 4
    assert link.alpha <= found.alpha <= link.alpha + TINY_BYTES * link.beta  # the tiny tensor has some
    assert found.beta == pytest.approx(link.beta, rel=1e-4)


def test_all_ranks_know_the_flops_of_all_together():
    one, other = run_ranks(lambda cluster: measure_flops(cluster.device), 2)
    assert one == other > 1e6
