"""Grade a learner's file: put its function into the lesson, and let the lesson's own tests judge it.

A grade ends in one sentence, whatever the learner's code does: it may be missing, not be Python, have another
signature, fail, hang or kill its process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exercises.catalog import Exercise
from exercises.checker.explain import Explanation, explain, load_error, name_of
from exercises.checker.inspect_file import problem_of
from exercises.checker.process import Tests
from exercises.find_the_bug import Bug
from exercises.names import exercise_named

LIMIT_SECONDS = 60.0  # of computing, for all tests of an exercise; on a busy machine that takes longer

PASSED, FAILED, UNSOLVED, INVALID, HANGS = "passed", "failed", "unsolved", "invalid", "hangs"

# A test's id, and None if it has passed, or why it has not.
Tell = Callable[[str, Explanation | None], None]


@dataclass(frozen=True)
class Grade:
    """The outcome of one check. `passed` and `failed` are test ids; a test that did not run has failed.

    `sentence` explains the first failed test, and `reasons` says in short what differs in each of the others.
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
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return 0 if self.state == PASSED else 1

    @property
    def credit(self) -> float:
        """The share of the tests that pass, 0 to 1. An exercise that is not written earns nothing."""
        number = len(self.passed) + len(self.failed)
        return len(self.passed) / number if number and self.state != UNSOLVED else 0.0


def grade(exercise: Exercise, file: Path, tell: Tell | None = None) -> Grade:
    """Return the grade of a learner's file. The tests run in a process of their own.

    `tell` is called after each test. The first test of an exercise is its fastest.
    """
    if (problem := problem_of(exercise, file)) is not None:
        state, sentence = problem
        return Grade(exercise.name, state, sentence, failed=exercise.tests)
    return judge(exercise, file, tell)


def judge(exercise: Exercise, file: Path, tell: Tell | None = None) -> Grade:
    """Run the tests with the function in `file`, which is Python or, from a notebook, a pickle."""
    found: list[dict[str, Any]] = []
    tests = Tests(exercise, file, LIMIT_SECONDS)
    try:
        for message in tests.messages():
            found.append(message)
            if tell is not None and "passed" in message:
                tell(message["id"], None if message["passed"] else explain(exercise, file, message))
    finally:
        code = tests.end()
    if code is None:
        sentence = f"The tests did not end within {LIMIT_SECONDS:g} s: look for a loop without an end."
        return _graded(exercise, file, found, HANGS, sentence)
    return _graded(exercise, file, found, INVALID, f"The tests' process ended early, with exit code {code}.")


def _graded(exercise: Exercise, file: Path, found: list[dict[str, Any]], state: str, sentence: str) -> Grade:
    """Return the grade from the tests' messages; `state` and `sentence` hold if no test has failed."""
    told = {name: value for message in found for name, value in message.items()}
    if "load_error" in told:
        sentence = load_error(file, told["load_error"])
        return Grade(exercise.name, INVALID, sentence, failed=exercise.tests)
    tests = [message for message in found if "passed" in message]
    passed = tuple(test["id"] for test in tests if test["passed"])
    failures = [test for test in tests if not test["passed"]]
    missing = tuple(test for test in exercise.tests if test not in passed)
    drawing, printed, reasons = "", "", {}
    beyond = told.get("beyond") or {"is_met": None, "sentence": ""}
    if failures:
        first, *others = failures
        state, sentence, drawing, _ = explain(exercise, file, first)
        reasons = {test["id"]: explain(exercise, file, test).reason for test in others}
        printed = first["failure"].get("printed", "")
    elif not missing:
        verb = "is fixed" if isinstance(exercise, Bug) else "is right"
        sentence = f"{exercise.title} {verb}: {_agreement(passed)}. {beyond['sentence']}"
        state, sentence = PASSED, sentence.strip()
    elif "skipped" in told:
        sentence = f'This machine cannot run the test "{name_of(missing[0])}": {told["skipped"]}.'
    elif passed:
        sentence = f"{name_of(missing[0])}: {sentence}"
    return Grade(exercise.name, state, sentence, passed, missing, drawing, printed, beyond["is_met"], reasons)


def _agreement(tests: tuple[str, ...]) -> str:
    return f"{len(tests)} tests of the lesson agree" if len(tests) != 1 else "1 test of the lesson agrees"


def report(grades: list[Grade]) -> dict:
    """Return the report for graders. `credit` is the share of an exercise's tests that pass, or the mean.

    `solved` has no partial credit: the minutes of the right exercises, as a share of the minutes of all.
    """
    minutes = {g.name: exercise_named(g.name).minutes for g in grades}
    rows = [{**vars(g), "credit": round(g.credit, 3), "minutes": minutes[g.name]} for g in grades]
    solved = sum(minutes[g.name] for g in grades if g.state == PASSED) / sum(minutes.values())
    mean = sum(g.credit for g in grades) / len(grades)
    return {"exercises": rows, "credit": round(mean, 3), "solved": round(solved, 3)}
