"""Run an exercise's tests in a process that is forked from a warm one, with torch and the lesson.

The warm process stays as long as the caller, and until the next lesson: `watch` waits for it once, and each
later check begins at once.
The tests' ranks are forked from it too. Nothing here imports torch, so a command starts quickly.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from exercises.catalog import ROOT, Exercise
from lab.launch.main_module import main_module_hidden, start_forkserver

_context: Any = multiprocessing.get_context("forkserver")
BUSY = 5  # on a busy machine, how many seconds of the clock a second of computing may take


_lesson: str | None = None  # of which the warm process has imported the modules, if it was started here


def warm_up(exercise: Exercise) -> None:
    """Start the warm process with what this exercise needs, unless there is one with its lesson.

    On ranks from the process of another lesson each test would import for seconds, and look like a hang.
    """
    global _lesson
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if _lesson not in (None, exercise.folder):
        os.close(server._forkserver_alive_fd)  # the old one ends with its last child
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None
    if server._forkserver_pid is None:
        _lesson = exercise.folder
    tests = dict.fromkeys(test.partition(".py::")[0].replace("/", ".") for test in exercise.tests)
    # The first optimizer would import torch._dynamo.
    modules = [] if exercise.module.startswith("comm.") else ["torch._dynamo"]
    modules += ["exercises.checker.watched", "exercises.checker.run_tests", exercise.module, *tests]
    start_forkserver(modules)


class Tests:
    """Start the tests of an exercise with the functions in `file`, and say what each has found."""

    def __init__(self, exercise: Exercise, file: Path, seconds: float) -> None:
        self.pipe, other = _context.Pipe(duplex=False)
        self.deadline = time.monotonic() + BUSY * seconds
        given = exercise, file.resolve(), other, seconds
        warm_up(exercise)
        with main_module_hidden():
            self.process = _context.Process(target=_main, args=given, daemon=True)
            self.process.start()
        other.close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the tests' process sends, until it ends or the time is up."""
        # Not the pipe's end alone: a process that the code has forked may hold it open.
        sources = [self.pipe, self.process.sentinel]
        with contextlib.suppress(EOFError):
            while self.pipe in wait(sources, max(0.0, self.deadline - time.monotonic())):
                yield self.pipe.recv()
        self.process.join(max(0.0, min(5.0, self.deadline - time.monotonic())))

    def end(self) -> int | None:
        """End the process and what it has started; return its exit code, or None if it used up its time."""
        code = self.process.exitcode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return None if code in (None, -signal.SIGXCPU) else code


def _main(exercise: Exercise, file: Path, pipe: Connection, seconds: float) -> None:
    own = os.getpid()
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(ROOT)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it starts ranks
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    # This process has been forked from the server, and its ranks are, too: it must not start another one.
    server.ensure_running = forkserver.ensure_running = lambda: None
    import exercises.checker.watched  # noqa: F401  # before the tests
    from exercises.checker.run_tests import run_tests

    def tell(message: dict[str, Any]) -> None:
        if os.getpid() != own:
            os._exit(0)
        pipe.send(message)

    # A process that the code has forked runs the test, too, until it has a result or forks again.
    os.register_at_fork(after_in_child=lambda: setattr(os, "fork", lambda: os._exit(0)))

    code = 1
    try:
        run_tests(exercise, file, tell, seconds)
        code = 0
    finally:
        os._exit(code)  # without the threads that the code has left


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
