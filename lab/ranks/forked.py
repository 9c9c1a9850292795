"""Start processes in milliseconds: fork them from a process that has already imported torch.

A spawned process would import torch again, which takes 2 s.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lab.launch.errors import WorkbookError
from lab.ranks.child import Job, rank_main

_can_fork = "forkserver" in multiprocessing.get_all_start_methods()
_context: Any = multiprocessing.get_context("forkserver" if _can_fork else None)
# The first optimizer would import torch._dynamo, which takes seconds.
_preload = ["lab.ranks.child", "lab.models.model", "torch._dynamo"]


def preload(*modules: str, first: bool = False) -> None:
    """Add modules that the forkserver imports, with `first` before torch. Call it before ranks start."""
    place = 0 if first else len(_preload)
    _preload[place:place] = modules


def warm_up() -> None:
    """Start the forkserver now, so that it imports while the caller does something else."""
    if not _can_fork:
        raise WorkbookError("run_ranks forks its ranks, and Windows has no fork; run it in WSL 2.")
    from multiprocessing.forkserver import ensure_running

    # torch.cuda.is_available() would start CUDA in the forkserver, and what is forked after that has no GPU.
    # With this variable torch asks the driver's library (NVML), which starts nothing.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with _main_module_hidden():
        _context.set_forkserver_preload(_preload)
        ensure_running()


class ForkedProcess:
    """Start a process that does a job, and hold the parent's ends of its pipes."""

    def __init__(self, job: Job) -> None:
        self.pipe, child_pipe = _context.Pipe()
        self.out, child_out = _context.Pipe(duplex=False)
        self.err, child_err = _context.Pipe(duplex=False)
        given = job, child_pipe, child_out, child_err
        self.process = _context.Process(target=rank_main, args=given, daemon=True)
        self.process.start()
        for end in (child_pipe, child_out, child_err):
            end.close()

    def death(self) -> str:
        """Return how the process has ended: "was killed by SIGKILL" or "exited with code 3"."""
        self.process.join(1)
        code = self.process.exitcode
        if code and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


def start(jobs: list[Job]) -> list[ForkedProcess]:
    """Start a process for each job, and return the processes."""
    warm_up()
    with _main_module_hidden():
        return [ForkedProcess(job) for job in jobs]


def end(processes: list[ForkedProcess]) -> None:
    """Kill the processes and all that they have started, wait for their ends, and close the pipes."""
    for one in processes:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(one.process.pid, signal.SIGKILL)
    # Wait only after all are killed: a process takes milliseconds to end, and several end in parallel.
    for one in processes:
        one.process.join()
        for end in (one.pipe, one.out, one.err):  # only now: a closed pipe says that the parent has died
            end.close()


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every rank."""
    main = sys.modules["__main__"]
    saved: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        main.__dict__.update(saved)
