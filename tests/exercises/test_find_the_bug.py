"""Every mutant of a technique is an exercise, whose file has the mistake and does not tell it."""

import ast
import dataclasses
import functools
import sys
from types import SimpleNamespace

import pytest

from exercises import find_the_bug
from exercises.catalog import EXERCISES
from exercises.checker.grade import Grade, grade
from exercises.checker.run_tests import load
from exercises.commands import main
from exercises.find_the_bug import Bug, bugs
from exercises.generate import generated, solution
from exercises.mutants import all_mutants
from exercises.names import all_exercises
from exercises.notebook import bug as show_in_a_notebook
from exercises.workspace import Workspace
from lab.replace import apply
from tests.exercises.in_process import run_tests


@functools.cache
def by_mutant() -> dict[str, Bug]:
    return {bug.mutant: bug for bug in bugs()}


@pytest.fixture
def summed() -> Bug:
    return by_mutant()["gradient_summed"]


def test_every_mutant_is_an_exercise_with_a_name_of_its_own():
    assert set(all_mutants()) == set(by_mutant())
    assert len(all_exercises()) == len(EXERCISES) + len(bugs())
    assert len(bugs()) >= 120
    assert len({bug.difficulty for bug in bugs()}) >= 4


def test_where_the_user_has_changed_a_lesson_its_mutants_are_left_out(monkeypatch):
    changed = dataclasses.replace(all_mutants()["gradient_summed"], changes={"gone": ""})
    others = {"gradient_summed": changed, "missing_broadcast": all_mutants()["missing_broadcast"]}
    monkeypatch.setattr(find_the_bug, "all_mutants", lambda: others)
    assert [bug.mutant for bug in bugs.__wrapped__()] == ["missing_broadcast"]


@pytest.mark.parametrize("name", all_mutants())
def test_a_file_has_the_mistake_under_the_lessons_name_and_does_not_tell_it(name):
    bug, mutant = by_mutant()[name], all_mutants()[name]
    text = generated(bug)
    assert [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)] == [bug.function]
    assert " #" not in text
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert bug.function not in {alias.asname or alias.name for node in imports for alias in node.names}
    for telltale in ("mutant", bug.mutant, mutant.killer, *mutant.cause):
        assert telltale not in text
    _, _, explanation = mutant.sentence.partition(": ")
    assert not explanation or explanation not in text.replace("\n", " ") or explanation in bug.symptom
    assert bug.symptom.endswith(".") and len(bug.symptom) > 12
    assert len(set(bug.hints)) == 3 and mutant.sentence in bug.hints[1]
    assert "tests/" not in bug.hints[0] and "::" not in bug.hints[0]
    assert ast.parse(solution(bug)).body and solution(bug).startswith("# The mistake: ")


def test_hints_lead_from_what_should_be_so_to_the_line(summed):
    assert summed.hints == (
        "With 2 ranks and one weight, print its gradient before and after each message. The test that "
        'notices it: "a gradient is the mean over ranks and not their sum".',
        f"What happens: {summed.mistake}",
        "Look at this line, and at what follows from it: `all_reduce(parameter.grad, 'sum', self.group)`",
    )
    in_one_line = next(bug for bug in bugs() if bug.function == "broadcast_from_root")
    assert in_one_line.hints[2] == "Look at this part of the line: `grad)`"


def test_a_file_that_was_not_changed_and_one_without_the_function_need_no_tests(tmp_path, summed):
    file = tmp_path / "bug.py"
    file.write_text(generated(summed) + "# a comment fixes nothing\n")
    result = grade(summed, file)
    assert (result.state, result.credit) == ("unsolved", 0.0)
    assert "the mistake is still there" in result.sentence
    file.write_text("x = 1\n")
    assert grade(summed, file).sentence.endswith("has no `finish_gradient_sync`.")


def test_the_file_fails_the_killer_and_passes_it_once_mended(tmp_path, summed):
    file = tmp_path / f"{summed.name}.py"
    text = generated(summed)
    for code, is_mended in ((text, False), (text.replace('"sum"', '"mean"'), True)):
        file.write_text(code)
        with apply(load(summed, file)):
            _, error = run_tests(summed, summed.tests[0])
        assert (error is None) == is_mended, error


def test_a_grade_tells_what_the_ranks_have_returned_and_what_they_should(tmp_path):
    bug, file = by_mutant()["all_gather_by_arrival"], tmp_path / "bug.py"
    file.write_text(generated(bug).replace("chunks = shards_of", "changed = chunks = shards_of"))
    said = grade(bug, file).sentence
    assert said.index("expected [1, 2, 11") < said.index(", got [1, 2, 31") < said.index("the wrong order")


def test_the_commands_make_the_file_once_keep_what_was_written_and_list_the_easiest_first(
    tmp_path, capsys, summed
):
    space = Workspace(tmp_path)
    assert main(["bug", summed.name], space) == 0
    assert summed.symptom in capsys.readouterr().out
    space.file(summed).write_text("mine\n")
    assert main(["bug", summed.name], space) == 0
    assert space.file(summed).read_text() == "mine\n"
    assert main(["bug", EXERCISES[0].name], space) == 2
    assert main(["bug"], space) == 0
    space.record(Grade(bugs()[0].name, "passed", "", ("one",)))
    assert space.next_bug() == bugs()[1]
    assert main(["bugs"], space) == 0
    out = capsys.readouterr().out
    assert f"1 of {len(bugs())} are fixed" in out
    places = [out.index(text) for text in ("comm, difficulty 1", "comm, difficulty 2", "data_parallel, ")]
    assert places == sorted(places)


def test_in_a_notebook_the_code_goes_into_the_next_cell(monkeypatch, capsys, summed):
    cells: list[str] = []
    shell = SimpleNamespace(set_next_input=cells.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    show_in_a_notebook(summed.name)
    assert "The code is in the next cell." in capsys.readouterr().out
    [cell] = cells
    assert cell.endswith(f"check(finish_gradient_sync, '{summed.name}')") and ast.parse(cell)


def test_a_solution_tells_the_mistake_and_marks_the_lines_that_differ(summed):
    told, lessons = solution(summed).split("# The lesson's own code:")
    assert summed.mistake.split()[-1] in told and '"mean"' in lessons
    assert [line[4] for line in told.splitlines() if line.startswith("#   ")] == ["-", "+"]
