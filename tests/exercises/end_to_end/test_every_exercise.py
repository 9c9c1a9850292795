"""Each exercise is checked as a learner does it, in a copy of the workbook, and by pytest."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exercises.catalog import EXERCISES, ROOT, Exercise
from exercises.catalog.exercise import LESSON_PACKAGES
from exercises.checker.plugin import load
from exercises.generate import generated, missing
from exercises.mutants import Mutant, all_mutants
from lab.replace import apply, replaced
from tests.exercises.in_process import run_tests, solved

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


@pytest.fixture(scope="module")
def workbook(tmp_path_factory) -> Path:
    """A learner's copy of the workbook, in which no exercise is solved."""
    copy = tmp_path_factory.mktemp("learner")
    for folder in (*LESSON_PACKAGES, "exercises", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".progress*", ".saved", "bugs")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for exercise in EXERCISES:
        (copy / "exercises" / exercise.file).write_text(generated(exercise))
    return copy


def run(workbook: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=workbook,
        env=os.environ | {"PYTHONPATH": str(workbook)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


@EACH
def test_it_fails_untouched_and_passes_with_the_lessons_code(workbook, exercise):
    file = workbook / "exercises" / exercise.file
    before = run(workbook, "exercises", "check", exercise.name)
    assert before.returncode == 1
    assert before.stdout.strip() == f"{exercise.name}: unsolved  {missing(exercise)}"
    file.write_text(solved(exercise))
    after = run(workbook, "exercises", "check", exercise.name)
    assert after.returncode == 0, after.stdout
    assert after.stdout.startswith(f"{exercise.name}: passed  {exercise.title} is right: ")
    file.write_text(generated(exercise))


@EACH
def test_each_of_its_tests_fails_without_the_learners_function(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(generated(exercise))
    with apply(load(exercise, file)):
        for test in exercise.tests:
            _, error = run_tests(exercise, test)
            assert error is not None, f"{test} passes without the learner's function"


def has_the_killer(exercise: Exercise, mutant: Mutant) -> bool:
    module, _, test = mutant.killer.rpartition(".")
    return f"{module.replace('.', '/')}.py::{test}" in exercise.tests


# If an exercise's tests include the mutant's killer, tests/test_mutants.py has shown that it fails.
WRONG = [
    (exercise, mutant)
    for exercise in EXERCISES
    for mutant in all_mutants().values()
    if mutant.target in exercise.targets and not has_the_killer(exercise, mutant)
]


@pytest.mark.parametrize("exercise, mutant", WRONG, ids=[mutant.name for _, mutant in WRONG])
def test_it_fails_with_a_wrong_implementation_that_was_shipped(exercise, mutant):
    with replaced(mutant.target, mutant.implementation):
        _, error = run_tests(exercise)
    assert error is not None


def test_a_passed_exercise_is_listed_as_passed(workbook):
    first = EXERCISES[0]
    (workbook / "exercises" / first.file).write_text(solved(first))
    run(workbook, "exercises", "check", first.name)
    listed = json.loads(run(workbook, "exercises", "list", "--json").stdout)["exercises"]
    assert {row["name"]: row["state"] for row in listed}[first.name] == "passed"
    (workbook / "exercises" / first.file).write_text(generated(first))


def test_pytest_grades_each_exercise_alone_by_its_marker(workbook):
    outcomes = workbook / "outcomes.json"
    names = [exercise.name for exercise in EXERCISES]
    done = run(workbook, "tests.exercises.end_to_end.grade_alone", str(outcomes), *names)
    assert done.returncode == 0, done.stdout
    found = {one["name"]: one for one in json.loads(outcomes.read_text())}
    for exercise in EXERCISES:
        outcome = found[exercise.name]
        assert outcome["exit_code"] == 1
        [row] = outcome["exercises"]
        assert (row["name"], row["state"], row["credit"]) == (exercise.name, "unsolved", 0.0)
        assert (row["passed"], row["failed"]) == ([], list(exercise.tests))
