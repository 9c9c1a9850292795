"""Each exercise is checked as a learner does it, in a copy of the workbook, and by pytest."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.catalog.exercise import LESSON_PACKAGES
from exercises.checker.run_tests import load
from exercises.find_the_bug import bugs, implementation
from exercises.generate import generated, missing
from exercises.mutants import all_mutants
from lab.replace import apply, replaced
from tests.exercises.in_process import run_tests, solved

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


@pytest.fixture(scope="module")
def workbook(tmp_path_factory) -> Path:
    """A learner's copy of the workbook, in which no exercise has been begun."""
    copy = tmp_path_factory.mktemp("learner")
    for folder in (*LESSON_PACKAGES, "exercises", "tests"):
        begun = {exercise.file.parts[0] for exercise in EXERCISES} if folder == "exercises" else ()
        ignored = shutil.ignore_patterns("__pycache__", ".progress*", ".saved", "bugs", *begun)
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("pyproject.toml", "entrypoint.sh"):  # a lesson's tests read the table of scripts
        shutil.copy(ROOT / file, copy)
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


@pytest.mark.parametrize("lesson", sorted({exercise.file.parts[0] for exercise in EXERCISES}))
def test_its_first_exercise_fails_untouched_and_passes_with_the_lessons_code(workbook, lesson):
    exercise = next(exercise for exercise in EXERCISES if exercise.file.parts[0] == lesson)
    file = workbook / "exercises" / exercise.file
    before = run(workbook, "exercises", "check", exercise.name)
    assert before.returncode == 1
    sentence, where = before.stdout.strip().split("\n")
    assert sentence == f"{exercise.name}: unsolved  {missing(exercise)}"
    assert f"Write in exercises/{exercise.file}." in where
    file.write_text(solved(exercise))
    after = run(workbook, "exercises", "check", exercise.name)
    assert after.returncode == 0, after.stdout
    assert f"\n{exercise.name}: passed  {exercise.title} is right: " in after.stdout
    file.unlink()


@EACH
def test_it_passes_with_the_lessons_code_and_each_of_its_tests_fails_untouched(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(solved(exercise))
    with apply(load(exercise, file)):
        test, error = run_tests(exercise)
    assert error is None, f"{test}: {error}"
    file.write_text(generated(exercise))
    with apply(load(exercise, file)):
        for test in exercise.tests:
            _, error = run_tests(exercise, test)
            assert error is not None, f"{test} passes without the learner's function"


# What the lesson's class does, and the stub of an open exercise does not ask for.
NOT_ASKED = {
    ("open_moe", "expert_choices_counted_again"),  # to count the choices at all
    ("zero2", "zero2_buckets_add_up"),  # to free gradients before finish_gradient_sync()
}
# If an exercise's tests include the mutant's killer, test_mutants.py has shown that it fails.
WRONG = [
    (exercise, mutant)
    for exercise in EXERCISES
    for mutant in all_mutants().values()
    if any(f"{mutant.target}.".startswith(f"{target}.") for target in exercise.targets)
    and mutant.killer not in exercise.tests
    and (exercise.name, mutant.name) not in NOT_ASKED
]


@pytest.mark.parametrize("exercise, mutant", WRONG, ids=[f"{e.name}-{m.name}" for e, m in WRONG])
def test_it_fails_with_a_wrong_implementation_that_was_shipped(exercise, mutant):
    with replaced(mutant.target, implementation(mutant)):
        _, error = run_tests(exercise)
    assert error is not None


def graded_by_pytest(workbook: Path, *options: str) -> tuple[list[dict], str]:
    """Return the rows of the report and the output of `pytest exercises`, which fails here."""
    report = workbook / "report.json"
    done = run(workbook, "pytest", "exercises", "--exercise-report", str(report), *options)
    assert done.returncode == 1, done.stdout
    return json.loads(report.read_text())["exercises"], done.stdout


def test_pytest_grades_all_exercises_or_those_with_a_marker_also_those_without_a_file(workbook):
    bug = next(bug for bug in bugs() if bug.target.startswith("pipeline_parallel."))
    (workbook / "exercises" / bug.file).parent.mkdir()
    (workbook / "exercises" / bug.file).write_text(bug.own_file())
    pipelines = [one for one in EXERCISES if one.file.parts[0] == "pipeline_parallel"]
    for options, chosen in ((), [*EXERCISES, bug]), (("-m", "pipeline_parallel"), pipelines):
        rows, _ = graded_by_pytest(workbook, *options)
        expected = [(one.name, "unsolved", 0.0, list(one.tests)) for one in chosen]
        assert [(row["name"], row["state"], row["credit"], row["failed"]) for row in rows] == expected


def test_pytest_gives_what_was_handed_in_partial_credit_and_shows_the_wrong_cell(workbook, tmp_path):
    gpipe = BY_NAME["pipeline_gpipe"]
    backwards = "return [row[: len(row) // 2] + row[: len(row) // 2 - 1 : -1] for row in table]"
    (tmp_path / gpipe.file).parent.mkdir()
    (tmp_path / gpipe.file).write_text(solved(gpipe).replace("return table", backwards))
    rows, out = graded_by_pytest(workbook, "-m", gpipe.name, "--submission", str(tmp_path))
    assert [(row["state"], row["credit"]) for row in rows] == [("failed", 0.5)]
    assert "0.50  pipeline_gpipe: 1 of 2 tests" in out
    assert "gpipe(2, 2), rank 0, slot 2: 0B0 is expected, but the row has 0B1 there." in out
