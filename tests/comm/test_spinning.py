"""A rank looks for messages before it sleeps, and sleeps at once where another program needs the core."""

import threading
import time

import pytest

from comm.transport import spinning
from comm.transport.spinning import Spinner
from comm.transport.work_queue import COMMUNICATION_THREAD


class Clock:
    """Stands in for the time module: it goes on only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spinning, "time", clock)
    return clock


class Looks:
    """Counts looks, and finds something at the look with this number."""

    def __init__(self, finds_at: int = 0) -> None:
        self.number, self._finds_at = 0, finds_at

    def __call__(self) -> bool:
        self.number += 1
        return self.number == self._finds_at


def waiting(clock: Clock, seconds: float):
    """Return what lets others run for this time."""

    def let_others_run() -> None:
        clock.now += seconds

    return let_others_run


def test_a_rank_looks_until_something_has_come_or_its_time_is_over(clock):
    spinner, looks = Spinner(3e-4), Looks(finds_at=3)
    assert spinner.spin(looks, waiting(clock, 1e-5)) and looks.number == 3
    assert not spinner.spin(Looks(), waiting(clock, 1e-5))
    assert clock.now == pytest.approx(100 + 3e-5 + 3e-4, abs=1.1e-5)


def test_a_rank_that_has_lost_its_core_to_another_program_sleeps_at_once_for_a_while(clock):
    spinner, looks = Spinner(3e-4), Looks()
    assert not spinner.spin(looks, waiting(clock, 3e-3)) and looks.number == 1, "it must look after the loss"
    assert not spinner.spin(looks, waiting(clock, 1e-5)) and looks.number == 1, "it looks during the pause"
    clock.now += spinning.SHORTEST_PAUSE
    assert spinner.spin(Looks(finds_at=1), waiting(clock, 1e-5)), "it does not look after the pause"


def test_the_pause_doubles_with_each_loss_and_is_short_again_after_a_find(clock):
    spinner = Spinner(3e-4)

    def pause_after_a_loss() -> float:
        spinner.spin(Looks(), waiting(clock, 3e-3))
        began, looks = clock.now, Looks()
        while not looks.number:
            clock.now += 1e-3
            spinner.spin(looks, waiting(clock, 1e-6))
        return clock.now - began

    pauses = [pause_after_a_loss() for _ in range(3)]
    assert pauses == pytest.approx([0.01, 0.02, 0.04], abs=2e-3)
    assert spinner.spin(Looks(finds_at=1), waiting(clock, 1e-6))
    assert pause_after_a_loss() == pytest.approx(0.01, abs=2e-3)


def test_what_was_found_after_a_loss_is_not_overlooked(clock):
    assert Spinner(3e-4).spin(Looks(finds_at=1), waiting(clock, 3e-3))


def test_a_communication_thread_leaves_the_core_to_the_computation():
    looks, found = Looks(finds_at=1), []
    thread = threading.Thread(
        target=lambda: found.append(Spinner(10.0).spin(looks)), name=COMMUNICATION_THREAD
    )
    began = time.monotonic()
    thread.start()
    thread.join(5)
    assert found == [False] and looks.number == 0 and time.monotonic() - began < 5
