"""Work on a background thread runs in order, and a process that ends well completes it."""

import threading
import time
from pathlib import Path

import pytest
import torch

from comm.background import BackgroundThread
from comm.collectives import all_reduce
from comm.script import joined
from lab.launch import ending
from lab.ranks import run_ranks

X = torch.ones(2)


def test_after_an_error_no_work_runs_and_the_error_is_raised_again():
    thread, done = BackgroundThread("test"), []
    works = [thread.run(lambda: done.append(1), X), thread.run(lambda: 1 / 0, X)]
    works.append(thread.run(lambda: done.append(2), X))
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(ZeroDivisionError):
            work.wait()
    assert done == [1]


def test_the_thread_ends_with_its_owner():
    thread = BackgroundThread("a thread of a test")
    thread.run(lambda: None, X).wait()
    [running] = [one for one in threading.enumerate() if one.name == "a thread of a test"]
    del thread
    running.join(10)
    assert not running.is_alive()


def test_a_rank_that_ends_well_first_completes_what_its_threads_do(tmp_path):
    def work(cluster, folder: Path) -> None:
        mean = torch.tensor([1.0 + cluster.rank])

        def average() -> None:
            time.sleep(0.3 * cluster.rank)
            all_reduce(mean, "mean")
            (folder / str(cluster.rank)).write_text(str(mean.item()))

        thread = BackgroundThread("average")
        thread.run(average, mean)

    run_ranks(work, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1.5", "1.5"]


def test_the_operations_of_a_group_are_completed_too():
    def work(cluster) -> float:
        x = torch.ones(1)
        time.sleep(0.3 * cluster.rank)
        all_reduce(x, async_op=True)
        ending.complete()
        return x.item()

    assert run_ranks(work, 2) == [2.0, 2.0]


def test_after_an_error_a_script_waits_for_no_thread():
    def work(cluster) -> int:
        released, thread = threading.Event(), BackgroundThread("stuck")
        try:
            with joined():
                thread.run(released.wait, X)
                raise KeyError("a mistake")
        except KeyError:
            ending.complete()
        return not released.is_set()

    assert run_ranks(work, 1, backend=None) == [True]
