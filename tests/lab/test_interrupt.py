import os
import signal
import time

import pytest

from lab.launch import interrupt
from lab.launch.errors import Stopped
from lab.launch.interrupt import FORWARDED_SECONDS, StopRequest

BOTH = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    at = [1000.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: at[0])
    return at


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(0)


@pytest.mark.parametrize("signum", BOTH)
def test_the_first_signal_requests_a_stop_and_says_so_in_a_line(signum, capfd):
    with StopRequest() as stop:
        assert not stop.requested
        send(signum)
    assert stop.requested
    out, err = capfd.readouterr()
    assert out == "" and err.strip() == "stopping after this step; a second Ctrl-C stops at once"


def test_sigusr1_requests_a_stop_by_the_scheduler_however_often_it_comes(clock, capfd):
    with StopRequest() as stop:
        for _ in range(3):
            send(signal.SIGUSR1)
            clock[0] += FORWARDED_SECONDS + 0.01
        assert stop.requested and stop.exit_code == Stopped.BY_SCHEDULER
    assert capfd.readouterr().err.strip() == "stopping after this step, because the scheduler asks for it"


@pytest.mark.parametrize("signum", BOTH)
def test_a_second_signal_later_stops_at_once_and_the_handlers_are_restored(clock, signum):
    before = [signal.getsignal(each) for each in (*BOTH, signal.SIGUSR1)]
    with pytest.raises(KeyboardInterrupt):
        with StopRequest() as stop:
            send(signal.SIGINT)
            clock[0] += FORWARDED_SECONDS + 0.01
            send(signum)
            pytest.fail("went on after the second signal")
    assert stop.requested and [signal.getsignal(each) for each in (*BOTH, signal.SIGUSR1)] == before
