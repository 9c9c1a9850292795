"""gloo's threads do not preempt the threads that they serve, in ranks of any launcher."""

import contextlib
import importlib
import os
from pathlib import Path

import pytest

from benchmarks import side_by_side
from comm.script import joined
from lab.launch import gloo_threads
from lab.launch.gloo_threads import keep_from_preempting
from lab.ranks import run_ranks
from tests.comm.places import places, set_variables

ROOT = Path(__file__).resolve().parent.parent.parent

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
def test_it_gives_way_in_ranks_that_join_over_a_store_too():
    def names_after_joining(cluster) -> dict[bool, set[str]]:
        set_variables(environments[cluster.rank])
        with joined():
            return may_preempt()

    environments = places([0, 1], 2)
    for names in run_ranks(names_after_joining, 2, backend=None):
        assert names[False] == {"gloo_tcp_loop"}
        assert "gloo_tcp_loop" not in names[True]


@needs_batch
def test_a_variable_leaves_them_as_torch_starts_them(monkeypatch):
    monkeypatch.setenv("GLOO_SCHED", "other")
    monkeypatch.setattr(os, "sched_setscheduler", pytest.fail)
    keep_from_preempting()


@needs_batch
def test_a_sandbox_may_forbid_it(monkeypatch):
    def forbid(*_: object) -> None:
        asked.append(True)
        raise PermissionError

    asked: list[bool] = []
    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    monkeypatch.setattr(gloo_threads, "_NAME", (Path("/proc/self/comm")).read_text().strip())
    keep_from_preempting()
    assert asked


def test_benchmarks_compare_with_gloo_as_torch_starts_it():
    for name in ("collectives", "data_parallel", "zero", "tensor_parallel", "pipeline", "gpus"):
        _, main = (
            (ROOT / "benchmarks" / f"{name}.py").read_text().split('if __name__ == "__main__":\n    ')[-2:]
        )
        assert main.removeprefix("side_by_side.").startswith("leave_gloo_as_it_is()"), name


def test_a_benchmark_that_is_imported_leaves_the_settings_of_the_importing_process(monkeypatch):
    monkeypatch.setenv("GLOO_SCHED", "")
    monkeypatch.delenv("GLOO_SCHED")
    importlib.reload(side_by_side)
    assert "GLOO_SCHED" not in os.environ
    side_by_side.leave_gloo_as_it_is()
    assert os.environ["GLOO_SCHED"] == "other"
