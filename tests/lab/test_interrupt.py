import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from lab.launch import interrupt
from lab.launch.errors import Stopped
from lab.launch.interrupt import FORWARDED_SECONDS, StopRequest

BOTH = [signal.SIGINT, signal.SIGTERM]
HANDLED = [*BOTH, signal.SIGUSR1]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    at = [1000.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: at[0])
    return at


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(0)


def handlers() -> list[object]:
    return [signal.getsignal(signum) for signum in HANDLED]


@pytest.fixture
def blocked() -> Iterator[None]:
    """Block SIGUSR1, as the launcher does for its ranks."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.parametrize("signum", BOTH)
def test_the_first_signal_requests_a_stop_and_says_so_in_a_line(signum, capfd):
    with StopRequest() as stop:
        assert not stop.requested
        send(signum)
        assert stop.requested
    assert stop.requested
    out, err = capfd.readouterr()
    assert out == "" and err.strip() == "stopping after this step; a second Ctrl-C stops at once"


@pytest.mark.parametrize("times", [1, 3])
def test_sigusr1_requests_a_stop_by_the_scheduler_however_often_it_comes(clock, capfd, times):
    with StopRequest() as stop:
        for _ in range(times):
            send(signal.SIGUSR1)
            clock[0] += FORWARDED_SECONDS + 0.01
        assert stop.requested and stop.exit_code == Stopped.BY_SCHEDULER
    assert capfd.readouterr().err.strip() == "stopping after this step, because the scheduler asks for it"


@pytest.mark.parametrize("signum", BOTH)
@pytest.mark.parametrize("scheduler_is_first", [True, False])
def test_a_stop_by_the_user_outweighs_one_by_the_scheduler(clock, signum, scheduler_is_first):
    signals = [signal.SIGUSR1, signum] if scheduler_is_first else [signum, signal.SIGUSR1]
    with StopRequest() as stop:
        for each in signals:
            send(each)
            clock[0] += FORWARDED_SECONDS + 0.01
        assert stop.exit_code == Stopped.BY_USER > Stopped.BY_SCHEDULER


def test_of_a_sigusr1_that_the_launcher_has_blocked_an_early_one_is_not_lost_and_a_late_one_is_ignored(
    blocked,
):
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # pytest's other threads do not block it
    with StopRequest() as stop:
        assert stop.exit_code == Stopped.BY_SCHEDULER
    send(signal.SIGUSR1)


def test_without_a_signal_nothing_is_requested_or_said(capfd):
    with StopRequest() as stop:
        pass
    assert not stop.requested and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("signum", BOTH)
def test_the_same_ctrl_c_passed_on_by_a_launcher_is_not_a_second_one(clock, capfd, signum):
    with StopRequest() as stop:
        send(signal.SIGINT)
        send(signum)
        clock[0] += FORWARDED_SECONDS
        send(signum)
        assert stop.requested
    assert capfd.readouterr().err.count("stopping") == 1


@pytest.mark.parametrize("signum", BOTH)
def test_a_second_signal_later_stops_at_once_and_the_handlers_are_restored(clock, signum):
    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        with StopRequest() as stop:
            send(signal.SIGINT)
            clock[0] += FORWARDED_SECONDS + 0.01
            send(signum)
            pytest.fail("went on after the second signal")
    assert stop.requested and handlers() == before


def test_the_previous_handlers_are_back_after_the_with():
    heard = []
    original = signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        before = handlers()
        with StopRequest() as stop:
            assert handlers() != before
            send(signal.SIGTERM)
            assert stop.requested and heard == []
        assert handlers() == before
        send(signal.SIGTERM)
        assert heard == ["before"]
    finally:
        signal.signal(signal.SIGTERM, original)


def test_the_step_goes_on_through_the_first_signal():
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    with StopRequest() as stop:
        timer.start()
        start = time.perf_counter()
        time.sleep(0.1)
        assert time.perf_counter() - start > 0.09 and stop.requested
    timer.join()


def test_a_stderr_that_is_gone_does_not_hinder_the_stop(monkeypatch):
    def broken(fd: int, data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(interrupt.os, "write", broken)
    with StopRequest() as stop:
        send(signal.SIGINT)
        assert stop.requested


def test_outside_the_main_thread_it_does_nothing():
    before, seen = handlers(), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((handlers() == before, stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)] and handlers() == before
