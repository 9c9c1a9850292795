"""Grade a learner's file: put its function into the lesson, and let the lesson's own tests judge it.

A grade ends in one sentence, whatever the learner's code does: it may be missing, not be Python, have another
signature, fail, hang or kill its process.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from exercises.catalog import ROOT, Exercise
from exercises.checker.explain import explain, load_error, most_telling, name_of
from exercises.checker.inspect_file import problem_of
from exercises.find_the_bug import Bug

LIMIT_SECONDS = 60.0  # of computing, for all tests of an exercise; on a busy machine that takes longer
BUSY = 5  # at most as many times as long
_LIMIT = "EXERCISE_LIMIT_SECONDS"

PASSED, FAILED, UNSOLVED, INVALID, HANGS = "passed", "failed", "unsolved", "invalid", "hangs"


@dataclass(frozen=True)
class Grade:
    """The outcome of one check. `passed` and `failed` are test ids; a test that did not run has failed.

    `drawing` shows a wrong schedule with the wrong cell marked, or the ranks that wait for each other, and
    `printed` what the code printed in the failed test, with each line's rank.
    `is_beyond` tells of a right solution whether it meets its target beyond correctness; None: it has none.
    """

    name: str
    state: str
    sentence: str
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    drawing: str = ""
    printed: str = ""
    is_beyond: bool | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.state == PASSED else 1

    @property
    def credit(self) -> float:
        """The share of the tests that pass, 0 to 1. An exercise that is not written earns nothing."""
        number = len(self.passed) + len(self.failed)
        return len(self.passed) / number if number and self.state != UNSOLVED else 0.0


def grade(exercise: Exercise, file: Path) -> Grade:
    """Return the grade of a learner's file. The tests run in a process of their own."""
    if (problem := problem_of(exercise, file)) is not None:
        state, sentence = problem
        return Grade(exercise.name, state, sentence, failed=exercise.tests)
    return judge(exercise, file)


def judge(exercise: Exercise, file: Path) -> Grade:
    """Run the tests with the function in `file`, which is Python or, from a notebook, a pickle."""
    with tempfile.TemporaryDirectory(prefix="exercise-") as folder:
        report = Path(folder) / "report.json"
        try:
            done = _run_tests(exercise, file, report)
            has_ended = done.returncode != -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            has_ended = False
        if not has_ended:
            sentence = f"The tests did not end within {LIMIT_SECONDS:g} s: look for a loop without an end."
            return _graded(exercise, file, report, HANGS, sentence)
        sentence = f"The tests' process ended early, with exit code {done.returncode}{_last_line(done)}."
        return _graded(exercise, file, report, INVALID, sentence)


def _run_tests(exercise: Exercise, file: Path, report: Path) -> subprocess.CompletedProcess[str]:
    asked = ["--exercise", exercise.name, str(file.resolve()), str(report)]
    plugin = ["-p", "exercises.checker.plugin", *asked]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *exercise.tests],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {_LIMIT: str(math.ceil(LIMIT_SECONDS))},
        timeout=BUSY * LIMIT_SECONDS,
    )


def _graded(exercise: Exercise, file: Path, report: Path, state: str, sentence: str) -> Grade:
    """Return the grade from the tests' report; `state` and `sentence` hold if no test has failed in it."""
    found = json.loads(report.read_bytes()) if report.exists() else {"load_error": None, "tests": []}
    if found["load_error"] is not None:
        sentence = load_error(exercise, file, found["load_error"])
        return Grade(exercise.name, INVALID, sentence, failed=exercise.tests)
    passed = tuple(test["id"] for test in found["tests"] if test["passed"])
    failures = [test for test in found["tests"] if not test["passed"]]
    missing = tuple(test for test in exercise.tests if test not in passed)
    drawing, printed, beyond = "", "", found.get("beyond") or {"is_met": None, "sentence": ""}
    if failures:
        failed = most_telling(failures)
        state, sentence, drawing = explain(exercise, file, failed)
        printed = failed["failure"].get("printed", "")
    elif not missing:
        verb = "is fixed" if isinstance(exercise, Bug) else "is right"
        sentence = f"{exercise.title} {verb}: {_agreement(passed)}. {beyond['sentence']}"
        state, sentence = PASSED, sentence.strip()
    elif why := found.get("skipped"):
        sentence = f'This machine cannot run the test "{name_of(missing[0])}": {why}.'
    elif passed:
        sentence = f"{name_of(missing[0])}: {sentence}"
    return Grade(exercise.name, state, sentence, passed, missing, drawing, printed, beyond["is_met"])


def _agreement(tests: tuple[str, ...]) -> str:
    return f"{len(tests)} tests of the lesson agree" if len(tests) != 1 else "1 test of the lesson agrees"


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f": {lines[-1].rstrip('.')}" if lines else ""


def report(grades: list[Grade]) -> dict:
    """Return the report for graders. `credit` is the share of an exercise's tests that pass, or the mean."""
    rows = [{**vars(g), "credit": round(g.credit, 3)} for g in grades]
    return {"exercises": rows, "credit": round(sum(g.credit for g in grades) / len(grades), 3)}
