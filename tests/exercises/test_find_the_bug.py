"""Every mutant of a technique is an exercise, whose file has the mistake and does not tell it."""

import ast
import dataclasses
import sys
from types import SimpleNamespace

import pytest

from exercises.catalog import BY_NAME, EXERCISES
from exercises.checker import grade as checker
from exercises.checker.explain import name_of
from exercises.checker.grade import Grade, excused, grade
from exercises.checker.plugin import load
from exercises.commands import main
from exercises.find_the_bug import bugs, described
from exercises.generate import generated, solution
from exercises.mutants import all_mutants
from exercises.names import all_exercises
from exercises.notebook import bug as show_in_a_notebook
from exercises.workspace import Workspace
from lab.replace import apply
from tests.exercises.in_process import run_tests

BY_MUTANT = {bug.mutant: bug for bug in bugs()}
SUMMED = BY_MUTANT["gradient_summed"]


def test_every_mutant_is_an_exercise_with_a_name_of_its_own():
    assert set(described()) == set(all_mutants()) == set(BY_MUTANT)
    assert len(all_exercises()) == len(EXERCISES) + len(bugs())
    assert len(bugs()) >= 120
    assert len({bug.difficulty for bug in bugs()}) >= 4


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.mutant)
def test_a_file_has_the_mistake_under_the_lessons_name_and_does_not_tell_it(bug):
    text, mutant = generated(bug), described()[bug.mutant]
    names = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert bug.function in names
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert not {alias.asname or alias.name for node in imports for alias in node.names} & set(names)
    for telltale in ("mutant", bug.mutant, mutant.killer, *mutant.cause):
        assert telltale not in text
    _, _, explanation = mutant.doc.partition(": ")
    assert not explanation or explanation not in text.replace("\n", " ") or explanation in bug.symptom
    assert bug.symptom.endswith(".") and len(bug.symptom) > 12
    assert len(set(bug.hints)) == 3 and mutant.doc in bug.hints[1]
    assert bug.hints[0].startswith("It should be so: ") and "tests/" not in bug.hints[0]
    assert ast.parse(solution(bug)).body and solution(bug).startswith("# The mistake: ")


def test_hints_lead_from_what_should_be_so_to_the_line():
    assert SUMMED.hints == (
        "It should be so: a gradient is the mean over ranks and not their sum.",
        f"What happens: {SUMMED.mistake}",
        "Look at this line, and at what follows from it: "
        "`all_reduce(parameter.grad, op='sum', group=self.group, pattern=self.pattern)`",
    )
    assert "`pattern` names the algorithm of a collective" in generated(SUMMED)


def test_a_file_that_was_not_changed_and_one_without_the_function_need_no_tests(tmp_path):
    file = tmp_path / "bug.py"
    file.write_text(generated(SUMMED) + "# a comment mends nothing\n")
    result = grade(SUMMED, file)
    assert (result.state, result.credit) == ("unsolved", 0.0)
    assert "the mistake is still there" in result.sentence
    file.write_text("x = 1\n")
    assert grade(SUMMED, file).sentence.endswith("has no `finish_gradient_sync`.")


def test_the_file_fails_the_killer_and_passes_it_once_mended(tmp_path):
    file = tmp_path / f"{SUMMED.name}.py"
    text = generated(SUMMED)
    for code, is_mended in ((text, False), (text.replace("op='sum'", "op='mean'"), True)):
        file.write_text(code)
        with apply(load(SUMMED, file)):
            _, error = run_tests(SUMMED, SUMMED.tests[0])
        assert (error is None) == is_mended, error


def test_a_test_that_the_short_implementation_never_passed_is_not_asked_for(monkeypatch):
    killer, lacking, broken = SUMMED.tests[:3]
    before = Grade(SUMMED.name, "failed", "", (broken,), (lacking,))
    monkeypatch.setattr(checker, "judge", lambda bug, file: before)
    mended = Grade(SUMMED.name, "failed", "It lacks a flag.", (killer, broken), (lacking,))
    assert (excused(SUMMED, mended).state, excused(SUMMED, mended).credit) == ("passed", 1.0)
    assert f'"{name_of(lacking)}" fails as it did before' in excused(SUMMED, mended).sentence
    exchanged = Grade(SUMMED.name, "failed", "It breaks.", (killer,), (lacking, broken))
    assert excused(SUMMED, exchanged) == dataclasses.replace(exchanged, failed=(broken,))
    still_wrong = Grade(SUMMED.name, "failed", "It sums.", (), SUMMED.tests)
    assert excused(SUMMED, still_wrong) is still_wrong


def test_the_commands_make_the_file_once_keep_what_was_written_and_list_the_easiest_first(tmp_path, capsys):
    space = Workspace(tmp_path)
    assert main(["bug", SUMMED.name], space) == 0
    assert SUMMED.symptom in capsys.readouterr().out
    space.file(SUMMED).write_text("mine\n")
    assert main(["bug", SUMMED.name], space) == 0
    assert space.file(SUMMED).read_text() == "mine\n"
    assert main(["bug", EXERCISES[0].name], space) == 2
    assert main(["bug"], space) == 0
    space.record(Grade(bugs()[0].name, "passed", "", ("one",)))
    assert space.next_bug() == bugs()[1]
    capsys.readouterr()
    assert main(["bug", bugs()[0].name], space) == 0
    assert "You have mended this bug" in capsys.readouterr().out
    assert main(["bugs"], space) == 0
    out = capsys.readouterr().out
    assert f"1 of {len(bugs())} are mended" in out
    headings = [line.split("  ")[0] for line in out.splitlines() if ", difficulty " in line]
    lessons = list(dict.fromkeys(heading.partition(",")[0] for heading in headings))
    assert headings == sorted(set(headings), key=lambda h: (lessons.index(h.partition(",")[0]), h))


def test_in_a_notebook_the_code_goes_into_the_next_cell(monkeypatch, capsys):
    cells: list[str] = []
    shell = SimpleNamespace(set_next_input=cells.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    show_in_a_notebook(SUMMED.name)
    assert "The code is in the next cell." in capsys.readouterr().out
    [cell] = cells
    assert cell.endswith(f"check(finish_gradient_sync, '{SUMMED.name}')") and ast.parse(cell)
    with pytest.raises(LookupError, match="asks you to write a function"):
        show_in_a_notebook(next(iter(BY_NAME)))


def test_a_solution_tells_the_mistake_and_marks_the_lines_that_differ():
    assert SUMMED.mistake.split()[-1] in solution(SUMMED).partition("# The lesson's own code:")[0]
    alike = solution(next(bug for bug in bugs() if "# What to change" in solution(bug)))
    marks = {line[:5] for line in alike.splitlines() if line.startswith("#   ")}
    assert "#   -" in marks or "#   +" in marks
