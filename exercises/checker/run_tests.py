"""Run tests of a lesson with a learner's functions in place of the lesson's, and report what each has found.

`run_ranks` sends the replacements to every rank, so the learner's functions run there too.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import cloudpickle
import pytest
import torch
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

import tests.conftest  # noqa: F401  # the settings of all tests
from exercises.catalog import PICKLE, ROOT, Exercise
from exercises.catalog import name_of as name_of_target
from exercises.checker.failure import failure_of
from exercises.checker.schedule_table import originals, wrong_table
from lab.ranks import run_ranks
from lab.replace import apply

HANG_SECONDS = 15.0  # a lesson's tests take less than this, also on a busy machine
MAX_PRINTED = 100_000  # bytes of a test
LOOK_SECONDS = 3.0  # in which also a busy machine moves one message


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
    """Report a hang soon in a `with` block: after HANG_SECONDS, or a cycle of ranks after two looks."""
    defaults = run_ranks.__kwdefaults__
    usual = dict(defaults)
    defaults.update(timeout=HANG_SECONDS, look_every=LOOK_SECONDS)
    try:
        yield
    finally:
        defaults.update(usual)


def error_of(test: str) -> BaseException | None:
    """Run the test with this id, as pytest writes it; return its error, or None if it passes."""
    name, _, parameter = test.partition(".py::")[2].partition("[")
    function = getattr(importlib.import_module(_module_of(test)), name)
    try:
        with short_hangs():
            function(**arguments_of(function, parameter.rstrip("]")))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's own failures are no Exceptions
        return error
    return None


def arguments_of(function: Any, identity: str) -> dict[str, object]:
    """Return the arguments of a test with one parameter, from its value as pytest writes it."""
    if not identity:
        return {}
    (mark,) = function.pytestmark
    values = list(mark.args[1])
    names = map(str, mark.kwargs.get("ids", values))
    return {mark.args[0]: dict(zip(names, values, strict=True))[identity]}


def _module_of(test: str) -> str:
    return test.partition(".py::")[0].replace("/", ".")


def run_tests(exercise: Exercise, file: Path, tell: Callable[[dict[str, Any]], None], seconds: float) -> None:
    """Run the exercise's tests in this process, which the system ends after `seconds` of computing.

    `tell` gets a message for each test, or one that says why none can run; and after a right solution what
    it costs, if the exercise has a target beyond correctness.
    """
    # A limit in seconds of the clock would take a busy machine for a loop without an end.
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), resource.getrlimit(resource.RLIMIT_CPU)[1]))
    sys.dont_write_bytecode = True  # that of the file could be out of date after the next save
    torch.set_num_threads(1)
    graded = settings.get_profile("workbook")  # the same examples in each check, which leave no file behind
    settings.register_profile("graded", graded, database=None, derandomize=True)
    settings.load_profile("graded")
    set_hypothesis_home_dir(os.devnull)  # where no folder can be made
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        lessons_own = originals(exercise)
        try:
            written = load(exercise, file)
        except (Exception, SystemExit) as error:
            return tell({"load_error": failure_of(error)})
        with apply(written):
            if all([*_outcomes(exercise, lessons_own, written, printed, tell)]) and exercise.beyond:
                from exercises.checker.targets import TARGETS  # which imports all lessons

                with contextlib.suppress(Exception):  # a right solution passes, whatever becomes of this
                    tell({"beyond": vars(TARGETS[exercise.beyond]())})


def _outcomes(
    exercise: Exercise,
    lessons_own: dict[str, Callable[..., Any]],
    written: dict[str, Callable[..., Any]],
    printed: IO[bytes],
    tell: Callable[[dict[str, Any]], None],
) -> Iterator[bool]:
    """Run the tests one by one, and yield whether each has passed. A hang ends the rest."""
    for test in exercise.tests:
        os.chdir(ROOT)  # also after code that has gone elsewhere
        sys.stdout.flush()
        begin = printed.seek(0, os.SEEK_END)
        error = error_of(test)
        sys.stdout.flush()
        printed.seek(begin)
        if isinstance(error, pytest.skip.Exception):
            tell({"skipped": str(error), "id": test})
        elif error is None:
            tell({"id": test, "passed": True, "failure": None})
        else:
            failure = failure_of(error, test, _table(lessons_own, written))
            failure["printed"] = printed.read(MAX_PRINTED).decode(errors="replace")
            tell({"id": test, "passed": False, "failure": failure})
            if failure["text"].startswith("no answer within"):
                yield False
                return
        yield error is None


def _table(lessons_own: dict[str, Callable[..., Any]], written: dict[str, Callable[..., Any]]) -> str | None:
    """Return the learner's schedule with the first wrong cell marked, if the exercise is a schedule."""
    for target, function in written.items():
        original = lessons_own.get(name_of_target(target))
        if original is not None and (text := wrong_table(original, function)) is not None:
            return text
    return None
