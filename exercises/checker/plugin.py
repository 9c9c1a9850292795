"""Let pytest run with a learner's function in place of the lesson's, and write what each test said to a file.

grade.py starts pytest with `-p exercises.checker.plugin`. `run_ranks` sends the replacement to
every rank, so the learner's function runs there too.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from exercises.catalog import Exercise
from exercises.catalog import name_of as name_of_target
from exercises.checker.failure import failure_of
from exercises.checker.schedule_table import originals, wrong_table
from exercises.names import exercise_named
from lab.ranks import forked, run_ranks
from lab.replace import apply

PICKLE = ".pickle"  # of functions that were defined in a notebook
HANG_SECONDS = 10.0  # a lesson's tests take less than this, also on a busy machine


def _limit_computing() -> None:
    """Let the system end this process, and each rank, after as many seconds of computing as grade.py says.

    A limit in seconds of the clock would take a busy machine for a loop without an end.
    """
    if seconds := os.environ.get("EXERCISE_LIMIT_SECONDS"):
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), most))


_limit_computing()


def load(exercise: Exercise, path: Path) -> dict[str, Callable[..., Any]]:
    """Return the learner's functions in a file, each with the path of what it replaces."""
    if path.suffix == PICKLE:
        return cloudpickle.loads(path.read_bytes())
    module = _executed(path)
    return {target: getattr(module, name_of_target(target)) for target in exercise.targets}


def _executed(path: Path) -> ModuleType:
    """Run a file as a module outside of sys.modules, so that ranks get its functions as they are now."""
    spec = importlib.util.spec_from_file_location(f"learners_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def short_hangs() -> Iterator[None]:
    """Report a hang after HANG_SECONDS in a `with` block, where a test does not ask for another timeout."""
    defaults = run_ranks.__kwdefaults__
    usual = defaults["timeout"]
    defaults["timeout"] = HANG_SECONDS
    try:
        yield
    finally:
        defaults["timeout"] = usual


class Plugin:
    def __init__(self, name: str, file: Path, report: Path) -> None:
        self.exercise, self.file, self.report = exercise_named(name), file, report
        self.found: dict[str, Any] = {"load_error": None, "tests": []}
        self.lessons_own, self.written = originals(self.exercise), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session):
        try:
            replacements = load(self.exercise, self.file)
        except (Exception, SystemExit) as error:
            self.found["load_error"] = failure_of(error)
            self.save()
            session.shouldstop = "the learner's file cannot be imported"
            return (yield)
        self.written = replacements
        with apply(replacements), short_hangs():
            result = yield
            self.measure()
            return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.skipped and call.excinfo is not None:
            self.found["skipped"] = str(call.excinfo.value)
            self.save()
        if report.when == "call" or report.failed:
            failure = None
            if call.excinfo is not None:
                failure = failure_of(call.excinfo.value, item.nodeid, self.table())
                failure["printed"] = report.capstdout
            self.found["tests"].append({"id": item.nodeid, "passed": report.passed, "failure": failure})
            self.save()
            if failure is not None and failure["text"].startswith("no answer within"):
                item.session.shouldstop = "the ranks hang"
        return report

    def measure(self) -> None:
        """Measure the target beyond correctness, if there is one and all tests have passed."""
        passed = [test for test in self.found["tests"] if test["passed"]]
        if self.exercise.beyond is None or len(passed) < len(self.exercise.tests):
            return
        from exercises.checker.targets import TARGETS  # which imports all lessons

        with contextlib.suppress(Exception):  # a right solution passes, whatever becomes of its measurement
            self.found["beyond"] = vars(TARGETS[self.exercise.beyond]())
            self.save()

    def table(self) -> str | None:
        """Return the learner's schedule with the first wrong cell marked, if the exercise is a schedule."""
        for target, written in self.written.items():
            original = self.lessons_own.get(name_of_target(target))
            if original is not None and (text := wrong_table(original, written)) is not None:
                return text
        return None

    def save(self) -> None:
        new = self.report.with_suffix(".new")
        new.write_text(json.dumps(self.found))
        new.replace(self.report)  # a process that is killed leaves a complete report


def start_ranks_with_few_imports(exercise: Exercise) -> None:
    """Start the forkserver before tests/conftest.py does, which imports all tests and so takes seconds."""
    tests = {test.partition(".py::")[0].replace("/", ".") for test in exercise.tests}
    measured_by = ["exercises.checker.targets"] if exercise.beyond else []
    forked.preload(exercise.module, *sorted(tests), *measured_by)
    forked.warm_up()


def pytest_addoption(parser):
    parser.addoption("--exercise", nargs=3, metavar=("NAME", "FILE", "REPORT"))


def pytest_configure(config):
    if asked := config.getoption("--exercise"):
        # What a rank keeps of a file could be out of date after the next save.
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        start_ranks_with_few_imports(exercise_named(asked[0]))
        config.pluginmanager.register(Plugin(asked[0], Path(asked[1]), Path(asked[2])))
