"""A function from a notebook's cell is graded as a file is."""

from pathlib import Path

import pytest

import exercises.notebook
from exercises.catalog import BY_NAME, Exercise
from exercises.grade import Grade
from exercises.notebook import check
from exercises.replacing_plugin import load
from lab.replace import apply
from tests.exercises.in_process import run_tests, solved


def defined_in_a_cell(name: str) -> dict:
    cell = {"__name__": "no_module_of_that_name"}
    exec(solved(BY_NAME[name]), cell)
    return cell


def judged_here(exercise: Exercise, file: Path) -> Grade:
    with apply(load(exercise, file)):
        test, error = run_tests(exercise)
    return Grade(exercise.name, "failed" if error else "passed", f"{test}: {error}", exercise.tests)


def test_a_function_from_a_cell_is_graded_under_its_own_name(capsys, monkeypatch):
    monkeypatch.setattr(exercises.notebook, "judge", judged_here)
    result = check(defined_in_a_cell("pipeline_gpipe")["gpipe"])
    assert (result.name, result.state, result.credit) == ("pipeline_gpipe", "passed", 1.0)
    assert capsys.readouterr().out.startswith("pipeline_gpipe: passed. ")


def test_another_signature_is_refused_in_a_sentence():
    result = check(lambda stages: [], "pipeline_gpipe")
    assert result.sentence == "The parameters must be (stages, microbatches), but they are (stages)."
    assert result.state == "invalid"


def test_an_unknown_or_ambiguous_function_is_answered_with_the_exercises_names():
    with pytest.raises(LookupError, match="There is no exercise with a function 'unknown'; give the"):
        check(lambda: None, "unknown")
    with pytest.raises(LookupError, match="Several exercises have a function 'forward'"):
        check(defined_in_a_cell("row_parallel")["forward"])
