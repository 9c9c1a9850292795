"""Every exercise fails unsolved and with wrong code, and is as its lesson generates it.

That it passes with the lesson's own code is tested in end_to_end.
"""

import ast
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT, Exercise
from exercises.checker.grade import grade
from exercises.checker.plugin import load
from exercises.generate import FOLDER, generated, missing
from exercises.mutants import Mutant, all_mutants
from lab.replace import apply, replaced
from tests.exercises.in_process import run_tests, solved

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


@EACH
def test_unsolved_it_fails_with_a_sentence_that_names_what_is_missing(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(generated(exercise))
    result = grade(exercise, file)
    assert (result.state, result.exit_code, result.credit) == ("unsolved", 1, 0.0)
    assert exercise.title in result.sentence and exercise.function in result.sentence
    with apply(load(exercise, file)):
        test, error = run_tests(exercise, exercise.tests[0])
        assert any(missing(exercise, target) in str(error) for target in exercise.targets), test


@EACH
def test_each_of_its_tests_runs_the_learners_function(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(solved(exercise))
    called = tmp_path / "called"
    learners = {target: ending_when_called(each, called) for target, each in load(exercise, file).items()}
    with apply(learners):
        for test in exercise.tests:
            called.unlink(missing_ok=True)
            _, error = run_tests(exercise, test)
            assert error is not None and called.exists(), f"{test} passes without the learner's function"


class WasCalled(Exception):
    """Raised by a learner's function, because nothing after its call is of interest."""


def ending_when_called(function: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Return a function that creates the file when it is called, on any rank, and then raises WasCalled."""
    name = str(file)

    @functools.wraps(function)
    def ending(*args: Any, **options: Any) -> Any:
        open(name, "w").close()
        raise WasCalled

    return ending


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


@EACH
def test_generating_it_again_gives_no_difference(exercise):
    path = Path("exercises", exercise.file)
    if is_changed_since_the_commit(path):
        pytest.skip(f"{path} is being worked on.")
    assert (FOLDER / exercise.file).read_text() == generated(exercise)


def is_changed_since_the_commit(path: Path) -> bool:
    """Return whether a learner has changed the file. Without git it counts as unchanged."""
    command = ["git", "diff", "--quiet", "HEAD", "--", str(path)]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=30).returncode == 1
    except OSError:
        return False


@EACH
def test_it_is_described_completely(exercise):
    assert 1 <= exercise.difficulty <= 5
    assert 5 <= exercise.minutes <= 120
    assert len(exercise.hints) == len(set(exercise.hints)) == 3
    assert all(hint.endswith((".", "?")) for hint in exercise.hints)
    assert exercise.tests
    earlier = list(BY_NAME)[: list(BY_NAME).index(exercise.name)]
    assert set(exercise.needs) <= set(earlier)


def test_exercises_are_in_the_order_of_the_notebooks_that_teach_them():
    notebooks = [exercise.notebook for exercise in EXERCISES]
    assert notebooks == sorted(notebooks) and EXERCISES[0].name == "sampler"


def test_names_are_unique_and_every_file_belongs_to_an_exercise():
    assert len(BY_NAME) == len(EXERCISES)
    files = {path.relative_to(FOLDER) for path in FOLDER.glob("*/*.py")}
    others = {path for path in files if path.parts[0] in ("mutants", "catalog", "checker", "bugs")}
    assert files - others == {exercise.file for exercise in EXERCISES}


@EACH
def test_what_it_imports_is_what_the_lessons_code_needs(exercise):
    tree = ast.parse(solved(exercise))
    names = [
        alias.asname or alias.name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(names) <= used and len(names) == len(set(names))
