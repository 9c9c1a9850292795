"""Let pytest grade exercises: `pytest exercises`, or `pytest exercises -m pipeline_1f1b`.

Each of a lesson's tests that grade an exercise is one test here, so what passes is the partial credit. An
exercise is graded in a process of its own, as by `python -m exercises check`, and no trace is shown. Its
markers are its name and its lesson's folder; a bug that has a file or is asked for has its name and `bug`.
"""

import csv
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
GRADES = pytest.StashKey[list]()


class NotPassed(Exception):
    """A test of a lesson does not pass with the learner's function. The text says why."""


class Exercises(pytest.File):
    """All exercises, also those without a file yet, and the bugs that have one or that `-m` names."""

    def collect(self):
        from exercises.catalog import EXERCISES
        from exercises.find_the_bug import bugs

        asked = re.findall(r"\w+", self.config.getoption("markexpr"))
        chosen = [bug for bug in bugs() if bug.name in asked or (FOLDER / bug.file).exists()]
        for exercise in (*EXERCISES, *chosen):
            for marker in markers_of(exercise):
                text = f"{marker}: the exercise, lesson or kind of exercise"
                self.config.addinivalue_line("markers", text)
            yield ExerciseFile.from_parent(self, path=FOLDER / exercise.file, exercise=exercise)


class ExerciseFile(pytest.File):
    """The learner's file of one exercise, or the one that was handed in."""

    def __init__(self, *, exercise, **options) -> None:
        super().__init__(**options)
        self.exercise, self.grade = exercise, None

    def collect(self):
        handed_in = self.config.getoption("--submission")
        self.learners = Path(handed_in, self.exercise.file) if handed_in else self.path
        for test in self.exercise.tests:
            item = LessonTest.from_parent(self, name=test.rpartition("::")[2], test=test)
            for marker in markers_of(self.exercise):
                item.add_marker(marker)
            yield item

    def graded(self):
        """Return the grade. The first of the exercise's tests that is asked for runs all of them."""
        from exercises.checker.grade import grade

        if self.grade is None:
            self.grade = grade(self.exercise, self.learners)
            self.config.stash[GRADES].append(self.grade)
        return self.grade


class LessonTest(pytest.Item):
    """One test of a lesson, with the learner's function in place of the lesson's."""

    def __init__(self, *, test: str, **options) -> None:
        super().__init__(**options)
        self.test = test

    def runtest(self) -> None:
        grade = self.parent.graded()
        if grade.state != "passed" and self.test not in grade.passed:
            reason = grade.reasons.get(self.test)
            told = reason or "\n".join(filter(None, (grade.sentence, grade.drawing)))
            raise NotPassed(f"{grade.name}: {told}")

    def repr_failure(self, excinfo, style=None):
        own = isinstance(excinfo.value, NotPassed)
        return str(excinfo.value) if own else super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, f"{self.parent.exercise.name}: {self.test}"


def markers_of(exercise) -> tuple[str, str]:
    kind = exercise.file.parts[0]
    return exercise.name, "bug" if kind == "bugs" else kind


def pytest_addoption(parser):
    group = parser.getgroup("exercises")
    group.addoption("--submission", metavar="FOLDER", help="grade the files that are in this folder")
    group.addoption(
        "--exercise-report", metavar="FILE", help="write the grades to a JSON file, or add rows to x.csv"
    )


def pytest_configure(config):
    from exercises.catalog.exercise import LESSON_PACKAGES
    from exercises.names import all_exercises, suggestion
    from exercises.workspace import problem_of_submission

    config.stash[GRADES] = []
    for name in re.findall(r"\w+", config.getoption("markexpr")):
        if name not in ("and", "or", "not", "bug", *LESSON_PACKAGES, *all_exercises()):
            raise pytest.UsageError(f"There is no exercise {name!r}{suggestion(name)}")
    folder = config.getoption("--submission")
    if folder is not None and (problem := problem_of_submission(Path(folder))):
        raise pytest.UsageError(problem)


def pytest_collect_file(file_path, parent):
    is_catalog = file_path == FOLDER / "catalog" / "__init__.py"
    return Exercises.from_parent(parent, path=file_path) if is_catalog else None


def pytest_terminal_summary(terminalreporter, config):
    from exercises.checker.grade import report

    if not (grades := config.stash[GRADES]):
        return
    terminalreporter.section("exercises")
    for grade in grades:
        number = len(grade.passed) + len(grade.failed)
        terminalreporter.write_line(
            f"{grade.credit:4.2f}  {grade.name}: {len(grade.passed)} of {number} tests"
        )
    summary = report(grades)
    terminalreporter.write_line(f"{summary['credit']:4.2f}  is the mean credit of {len(grades)}")
    terminalreporter.write_line(f"{summary['solved']:4.2f}  of their minutes belong to right ones")
    if path := config.getoption("--exercise-report"):
        write_report(Path(path), summary, Path(config.getoption("--submission") or FOLDER).name)


def write_report(file: Path, summary: dict, student: str) -> None:
    """Write the report as JSON. If the file is a table, `x.csv`, add a row for each exercise."""
    from exercises.workspace import locked

    if file.suffix != ".csv":
        file.write_text(json.dumps(summary, indent=1) + "\n")
        return
    columns = ("name", "state", "credit", "minutes")
    # Several students may be graded at once.
    with locked(file.parent), file.open("a", newline="", encoding="utf-8") as table:
        rows = csv.writer(table)
        if not table.tell():
            rows.writerow(("student", *columns))
        rows.writerows((student, *map(row.get, columns)) for row in summary["exercises"])
