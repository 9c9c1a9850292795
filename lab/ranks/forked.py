"""Start ranks in milliseconds, fork them from a process that has already imported torch, and supervise them.

A spawned process would import torch again, which takes 2 s. `Processes` shows what the ranks print and yields
what they send. `run_ranks` (one answer of each rank) and StandingRanks (one for each cell) are built on it.
"""

import multiprocessing
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lab.launch.errors import WorkbookError
from lab.launch.main_module import main_module_hidden, start_forkserver
from lab.ranks.child import Job, rank_main

_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93)  # of the tags of ranks
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
    # torch.cuda.is_available() would start CUDA in the forkserver, and what is forked after that has no GPU.
    # With this variable torch asks the driver's library (NVML), which starts nothing.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    start_forkserver(_preload)


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
        self.process.join(10)  # its pipe is closed; the forkserver may be slow to tell its exit code
        code = self.process.exitcode
        if code and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


class Processes:
    """Start a process for each job, show what they print, and yield what they send, until `end`."""

    def __init__(self, jobs: list[Job]) -> None:
        warm_up()
        with main_module_hidden():
            self.all = [ForkedProcess(job) for job in jobs]
        self._selector = selectors.DefaultSelector()
        for rank, one in enumerate(self.all):
            for pipe, what in ((one.pipe, ""), (one.out, "stdout"), (one.err, "stderr")):
                self._selector.register(pipe, selectors.EVENT_READ, (rank, what, bytearray()))

    def messages(self, seconds: float | None) -> Iterator[tuple[int, bytes | None]]:
        """Show what ranks print, and yield (rank, message), or (rank, None) for one that has ended.

        Stop after `seconds`, or when all ranks have ended. With 0 seconds take what is there.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._selector.get_map():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._selector.select(left)
            for key, _ in ready:
                rank, what, buffer = key.data
                if what:
                    self._show(rank, key.fileobj, getattr(sys, what), buffer)
                    continue
                try:
                    message = self.all[rank].pipe.recv_bytes()
                except (EOFError, OSError):
                    self.forget(rank)
                    message = None
                yield rank, message
            # Check the time even if there is output: a rank may print without end.
            if not ready or (deadline is not None and time.monotonic() >= deadline):
                return

    def forget(self, rank: int) -> None:
        """Wait for no more messages of this rank."""
        self._selector.unregister(self.all[rank].pipe)

    def _show(self, rank: int, pipe: Any, stream: Any, buffer: bytearray) -> None:
        data = os.read(pipe.fileno(), 65536)
        buffer += data
        if data and b"\n" not in data:
            return  # a line of many megabytes comes in many pieces
        *lines, rest = bytes(buffer).split(b"\n")
        if not data:  # the pipe is closed
            self._selector.unregister(pipe)
            lines, rest = [*lines, *filter(None, [rest])], b""
        buffer[:] = rest  # an unfinished line
        ipython, tag = sys.modules.get("IPython"), f"[rank {rank}]"
        # A kernel of Jupyter shows colours, too. Having imported IPython is not enough to be one.
        if stream.isatty() or (ipython is not None and hasattr(ipython.get_ipython(), "kernel")):
            tag = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{tag}\033[0m"
        for line in lines:
            print(tag, line.decode(errors="replace"), file=stream)
        stream.flush()

    def end(self) -> None:
        """Kill the processes and all that they have started, wait for their ends, and close the pipes."""
        for one in self.all:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(one.process.pid, signal.SIGKILL)
        # Wait only after all are killed: a process takes milliseconds to end, and several end in parallel.
        for one in self.all:
            one.process.join()
            for end in (one.pipe, one.out, one.err):  # only now: a closed pipe says that the parent has died
                end.close()
        self._selector.close()
