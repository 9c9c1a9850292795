"""gloo's threads do not preempt the threads that they serve, in ranks of any launcher."""

import contextlib
import os
from pathlib import Path

import pytest

from lab.launch.gloo_threads import keep_from_preempting
from lab.ranks import run_ranks

needs_batch = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


def may_preempt() -> dict[bool, set[str]]:
    """Return the names of this process's threads: those that may preempt others, and those that may not."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            may = os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER
            names[may].add((task / "comm").read_text().strip())
    return names


@needs_batch
def test_only_gloos_loop_gives_way_in_ranks_of_run_ranks():
    for names in run_ranks(lambda _: may_preempt(), 2):
        assert names[False] == {"gloo_tcp_loop"}
        assert "gloo_tcp_loop" not in names[True] and names[True]


@needs_batch
def test_a_variable_leaves_them_as_torch_starts_them(monkeypatch):
    monkeypatch.setenv("GLOO_SCHED", "other")
    monkeypatch.setattr(os, "sched_setscheduler", pytest.fail)
    keep_from_preempting()
