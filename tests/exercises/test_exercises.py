"""Every exercise fails unsolved, and is as its lesson generates it.

That it passes with the lesson's own code, and fails with wrong code, is tested in end_to_end.
"""

import ast
import subprocess
from pathlib import Path

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.checker.grade import grade
from exercises.checker.plugin import load
from exercises.generate import FOLDER, generated
from lab.replace import apply
from tests.exercises.in_process import run_tests, solved

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


@EACH
def test_unsolved_it_fails_and_the_grade_names_what_is_missing(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(generated(exercise))
    result = grade(exercise, file)
    assert (result.state, result.exit_code, result.credit) == ("unsolved", 1, 0.0)
    assert exercise.function in result.sentence
    with apply(load(exercise, file)):
        _, error = run_tests(exercise, exercise.tests[0])  # the others: end_to_end
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
