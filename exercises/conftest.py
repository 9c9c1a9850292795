"""Let pytest grade exercises by name or marker: `pytest exercises -m pipeline_1f1b`, `pytest -k zero1`.

Each of a lesson's tests that grade an exercise is one test here, so what passes is the partial credit. An
exercise is graded in a process of its own, as by `python -m exercises check`, and no trace is shown.

A run of all tests of the workbook leaves the exercises out, because a learner's files are not finished.
"""

import difflib
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent


class NotPassed(Exception):
    """A test of a lesson does not pass with the learner's function. The text says why."""


class ExerciseFile(pytest.File):
    """The learner's file of one exercise, or the one that was handed in."""

    def collect(self):
        from exercises.names import all_exercises

        self.exercise = all_exercises()[self.path.stem]
        handed_in = self.config.getoption("--submission")
        self.learners = Path(handed_in, self.exercise.file) if handed_in else self.path
        self.grade = None
        for test in self.exercise.tests:
            item = LessonTest.from_parent(self, name=test.rpartition("::")[2], test=test)
            for name in markers_of(self.exercise):
                item.add_marker(name)
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
            raise NotPassed("\n".join(filter(None, (f"{grade.name}: {grade.sentence}", grade.drawing))))

    def repr_failure(self, excinfo, style=None):
        own = isinstance(excinfo.value, NotPassed)
        return str(excinfo.value) if own else super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, f"{self.parent.exercise.name}: {self.test}"


GRADES = pytest.StashKey[list]()


def markers_of(exercise) -> list[str]:
    """Return the markers of an exercise: its name, its lesson's folder and, if it has one, "bug"."""
    return [
        exercise.name,
        exercise.target.partition(".")[0],
        *(["bug"] if exercise.file.parts[0] == "bugs" else []),
    ]


def is_asked_for(arguments: list[str], testpaths: list[str], expressions: list[str], names: set[str]) -> bool:
    """Return whether the command line asks for exercises, and not for the tests of the workbook."""
    paths = {Path(argument.partition("::")[0]).resolve() for argument in arguments}
    is_default = paths == {Path(path).resolve() for path in testpaths}
    if not is_default and any(path.is_relative_to(FOLDER) for path in paths):
        return True
    return any(names & set(re.findall(r"\w+", expression)) for expression in expressions)


def pytest_addoption(parser):
    group = parser.getgroup("exercises")
    group.addoption(
        "--submission", metavar="FOLDER", help="grade the files that were handed in in this folder"
    )
    group.addoption("--exercise-report", metavar="FILE", help="write the grades to this file, as JSON")


def pytest_configure(config):
    config.stash[GRADES] = []
    folder = config.getoption("--submission")
    if folder is not None and not Path(folder).is_dir():
        raise pytest.UsageError(f"There is no folder {folder}.")


def unknown_marker(expression: str, known: set[str]) -> str | None:
    """Return a sentence about the first word of a marker expression that is no marker, or None."""
    for word in re.findall(r"[^\W\d]\w*", re.sub(r"\([^()]*=[^()]*\)", "", expression)):
        if word not in known | {"and", "or", "not", "True", "False"}:
            near = difflib.get_close_matches(word, sorted(known), n=1)
            end = f": did you mean {near[0]}?" if near else "."
            return f"There is no exercise or lesson {word}{end}"
    return None


def pytest_collect_file(file_path, parent):
    if file_path.suffix != ".py" or file_path.parent.parent != FOLDER:
        return None
    from exercises.names import all_exercises

    exercise = all_exercises().get(file_path.stem)
    if exercise is None or FOLDER / exercise.file != file_path:
        return None
    for name in markers_of(exercise):
        parent.config.addinivalue_line("markers", f"{name}: the exercise, lesson or kind of exercise")
    return ExerciseFile.from_parent(parent, path=file_path)


def left_out(item, names: list[str], is_asked: bool, keyword: str) -> bool:
    """Return whether an item is a test of an exercise for which the command line does not ask.

    `-k sampler` asks for the exercise of that name, and not for others whose tests have it in their names.
    """
    if not isinstance(item, LessonTest):
        return False
    return not is_asked or (keyword in names and item.parent.exercise.name != keyword)


def asks_for_bugs(arguments: list[str], expressions: list[str], names: set[str]) -> bool:
    """Return whether the command line asks for bugs: by their folder, by `bug`, or by one's name.

    Which bugs have files depends on which ones have been opened. So a lesson's marker leaves them out.
    """
    if any("bugs" in Path(argument.partition("::")[0]).parts for argument in arguments):
        return True
    words = {word for expression in expressions for word in re.findall(r"\w+", expression)}
    return "bug" in words or any(word.startswith("bug_") for word in names & words)


def pytest_collection_modifyitems(config, items):
    from exercises.names import all_exercises

    by_name = all_exercises()
    names, keyword = list(by_name), config.getoption("keyword").strip()
    expressions = [config.getoption("markexpr"), keyword]
    is_asked = is_asked_for(config.args, config.getini("testpaths"), expressions, set(names))
    if is_asked_for(config.args, config.getini("testpaths"), [], set()):
        lessons = {marker for exercise in by_name.values() for marker in markers_of(exercise)}
        others = {re.split(r"\W", line)[0] for line in config.getini("markers")}
        if problem := unknown_marker(expressions[0], lessons | others):
            raise pytest.UsageError(problem)
    if not asks_for_bugs(config.args, expressions, set(names)):
        bugs = [i for i in items if isinstance(i, LessonTest) and "bug" in markers_of(i.parent.exercise)]
        config.hook.pytest_deselected(items=bugs)
        items[:] = [item for item in items if item not in bugs]
    gone = [item for item in items if left_out(item, names, is_asked, keyword)]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if not left_out(item, names, is_asked, keyword)]
    items.sort(key=lambda i: names.index(i.parent.exercise.name) if isinstance(i, LessonTest) else -1)


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
    if path := config.getoption("--exercise-report"):
        Path(path).write_text(json.dumps(summary, indent=1) + "\n")
