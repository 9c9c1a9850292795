"""Each exercise is checked as a learner does it, in a copy of the workbook, and by pytest."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from comm.algorithms import star
from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.catalog.exercise import LESSON_PACKAGES
from exercises.checker.run_tests import load
from exercises.find_the_bug import bugs, implementation
from exercises.generate import generated, missing
from exercises.mutants import all_mutants
from lab.replace import apply, replaced
from pipeline_parallel.schedules import gpipe
from tests.exercises.in_process import run_tests, solved
from tests.exercises.other_ways import SOLUTIONS, NaiveDataParallel
from tests.run_modes import python

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
    done = python("-m", *arguments, cwd=workbook, timeout=300, PYTHONPATH=str(workbook))
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
    ("deferred_weight_gradients", "pipeline_complex_weight_gradient"),  # numbers that are not real
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


def test_the_command_of_a_week_grades_its_exercises_and_its_bugs_in_a_fresh_clone():
    page = (ROOT / "docs" / "course.md").read_text()
    weeks = re.findall(r'^pytest (exercises -m )"(.+)"  # week 4$', page, re.MULTILINE)
    [names] = {expression for _, expression in weeks if "balance_experts" in expression}
    done = python("-m", "pytest", "exercises", "--collect-only", "-q", "-m", names)
    found = re.findall(r"^exercises/\w+/(\w+)\.py: \d", done.stdout, re.MULTILINE)
    assert set(found) == set(names.split(" or ")), done.stdout + done.stderr


OPEN = [exercise for exercise in EXERCISES if exercise.stub]


class OneByOne(NaiveDataParallel):
    """Has the signature of buckets, and sends each gradient alone, after the backward."""

    def __init__(self, module, group=None, bucket_mb=1.0):
        super().__init__(module, group)


@pytest.mark.parametrize("exercise", OPEN, ids=lambda exercise: exercise.name)
def test_another_way_passes(exercise):
    with apply(dict(zip(exercise.targets, SOLUTIONS[exercise.name], strict=True))):
        test, error = run_tests(exercise)
    assert error is None, f"{test}: {error}"


@pytest.mark.parametrize(
    "name, wrong, number, words",
    [
        ("open_all_reduce", star.all_reduce, 2, "bytes on 3 ranks, and not 2(n-1)/n"),
        (
            "open_buckets",
            OneByOne,
            1,
            "a step sent 16 messages for 8 KiB in buckets of 2 KiB on 2 ranks, and not",
        ),
        ("open_buckets", OneByOne, 3, "all messages left after the backward"),
        ("open_1f1b", gpipe, 1, "with 2 stages and 4 microbatches rank 0 holds 4 microbatches, and not 2"),
    ],
)
def test_what_is_right_and_wasteful_fails_and_the_error_says_how_much(name, wrong, number, words):
    exercise = BY_NAME[name]
    with apply({exercise.target: wrong}):
        _, error = run_tests(exercise, exercise.tests[number])
    assert words in str(error)
