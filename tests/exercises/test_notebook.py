"""A function from a notebook's cell is graded as a file is."""

from pathlib import Path

import cloudpickle
import pytest
from IPython.core.interactiveshell import InteractiveShell

import exercises.notebook
from exercises.catalog import BY_NAME, Exercise
from exercises.checker.explain import explain
from exercises.checker.grade import Grade
from exercises.checker.run_tests import load
from exercises.notebook import check
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


def test_an_error_and_a_hang_in_a_cell_name_the_line_of_the_cell(tmp_path):
    name = "/tmp/ipykernel_7/123456.py"
    file = tmp_path / "pipeline_gpipe.pickle"
    file.write_bytes(cloudpickle.dumps({"pipeline_parallel.schedules.gpipe": len}))
    trace = f'File "{name}", line 2, in gpipe\nFile "/library.py", line 9, in f\nKeyError: 1'
    stuck = "no answer within 1 s.\n  rank 0 is stuck at /comm/wire.py:61 in wait: work.wait()\n"
    stuck += f"      called from {name}:2 in gpipe: "
    cases = (
        (trace, f"rank 0 failed:\n\n{trace}", "line 2 of your cell: KeyError: 1"),
        (stuck, stuck, "at line 2 of"),
    )
    for where, text, said in cases:
        failure = dict.fromkeys(("difference", "cause", "drawing", "is_error"), "")
        failure |= {"rank": 0, "text": text, "trace": where, "difference": "KeyError: 1"}
        sentence = explain(BY_NAME["pipeline_gpipe"], file, {"id": "test_it", "failure": failure}).sentence
        assert said in sentence and "outside" not in sentence


def test_another_signature_is_refused_in_a_sentence():
    result = check(lambda stages: [], "pipeline_gpipe")
    assert result.sentence == "The parameters must be (stages, microbatches), but they are (stages)."
    assert result.state == "invalid"


def test_a_wrong_name_is_answered_in_a_sentence_without_a_traceback(capsys):
    with pytest.raises(LookupError, match=r"Several exercises have a function 'forward': .*row_parallel"):
        check(defined_in_a_cell("row_parallel")["forward"])
    shell = InteractiveShell()
    for call in ('check(gpipe, "pipeline_gpip")', 'bug("bug_naive")'):
        shell.push({"check": check, "bug": exercises.notebook.bug} | defined_in_a_cell("pipeline_gpipe"))
        shell.run_cell(call)
        printed = "".join(capsys.readouterr())
        assert printed.count("\n") == 1 and printed.startswith("There is no exercise")
