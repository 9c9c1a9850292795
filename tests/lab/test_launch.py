"""Ranks get GPUs in turn and their share of the cores, and a signal stops a training after its step."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from lab.launch import interrupt, threads, torchrun
from lab.launch.errors import Stopped, WorkbookError
from lab.launch.interrupt import FORWARDED_SECONDS, StopRequest
from lab.ranks import run_ranks
from tests.run_modes import python


def with_gpus(number: int) -> mock._patch:
    return mock.patch.multiple(torch.cuda, is_available=lambda: number > 0, device_count=lambda: number)


@pytest.mark.parametrize(
    "gpus, options, sentence",
    [
        (0, {"device": "cuda"}, "device='cuda'): this machine has 0 GPUs."),
        (2, {"device": "gpu"}, "device='gpu'): it must be 'cpu' or 'cuda'."),
        (2, {"backend": "nccl"}, "backend='nccl'): nccl sends from GPUs only; add device='cuda'."),
        (2, {"backend": "nccl", "device": "cuda"}, "backend='nccl'): 3 ranks have 2 GPUs, and nccl needs"),
    ],
)
def test_devices_that_are_not_there_are_refused_in_a_sentence(gpus, options, sentence):
    with with_gpus(gpus), pytest.raises(WorkbookError) as error:
        run_ranks(lambda cluster: None, 3, **options)
    assert str(error.value).startswith(f"run_ranks({sentence}")


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_a_containers_limit_is_read(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(threads, "CGROUP", Path(tmp_path))
    assert threads.core_limit() == cores


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


def test_processes_are_forked_also_where_the_folder_for_temporary_files_has_a_long_name(tmp_path):
    (folder := tmp_path / ("a" * 90)).mkdir()
    code = "import multiprocessing, lab.launch.main_module as ours\nours.start_forkserver([])\n"
    code += "process = multiprocessing.get_context('forkserver').Process(target=print, args=['forked'])\n"
    code += "process.start(), process.join()\nprint(multiprocessing.util.get_temp_dir())"
    done = python("-c", code, TMPDIR=str(folder))
    assert done.returncode == 0, done.stderr
    said, used = done.stdout.splitlines()
    assert said == "forked" and used.startswith("/tmp/pymp-") and not Path(used).exists()


def test_a_signal_that_nohup_has_switched_off_does_not_end_the_launcher():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert "SIGHUP" in torchrun._signals_to_handle()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert {"SIGTERM"} <= set(torchrun._signals_to_handle()) <= {"SIGTERM", "SIGQUIT"}
    finally:
        signal.signal(signal.SIGHUP, before)


WORK = """
import multiprocessing, sys, threading, time
from lab.launch.ending import complete_at_end

def main(seconds, mistake):
    thread = threading.Thread(target=lambda: print("done", time.sleep(seconds)), daemon=True)
    thread.start()
    complete_at_end(thread)
    if mistake:
        raise KeyError("a mistake")
"""


@pytest.mark.parametrize(
    "way", ["main(*{})", "multiprocessing.get_context('fork').Process(target=main, args={}).start()"]
)
def test_a_process_that_ends_well_completes_the_work_of_threads_and_one_with_an_error_ends_at_once(way):
    assert python("-c", WORK + way.format((0.2, False))).stdout == "done None\n"
    begin = time.monotonic()
    done = python("-c", WORK + way.format((60, True)))
    assert time.monotonic() - begin < 30 and "KeyError: 'a mistake'" in done.stderr and not done.stdout
