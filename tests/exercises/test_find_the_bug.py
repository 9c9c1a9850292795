"""Every mutant of a technique is an exercise, whose file has the mistake and does not tell it."""

import ast
import dataclasses
import sys
from types import SimpleNamespace

import pytest

import exercises.checker.grade
from exercises.bug_difficulty import difficulty_of
from exercises.catalog import BY_NAME, EXERCISES
from exercises.checker.explain import name_of
from exercises.checker.grade import Grade, excused, grade
from exercises.checker.plugin import load
from exercises.commands import main
from exercises.find_the_bug import EQUIPMENT, WRONG_IN_WHAT_WAY, bugs, described
from exercises.generate import generated, solution
from exercises.mutants import all_mutants
from exercises.names import all_exercises, exercise_named
from exercises.notebook import bug as show_in_a_notebook
from exercises.workspace import Workspace
from lab.replace import apply
from tests.exercises.in_process import run_tests

BY_MUTANT = {bug.mutant: bug for bug in bugs()}
SUMMED = BY_MUTANT["gradient_summed"]


def test_every_mutant_of_a_technique_is_an_exercise_with_a_name_of_its_own():
    assert set(described()) == set(all_mutants())
    assert set(BY_MUTANT) == {
        each.name for each in described().values() if not each.target.startswith(EQUIPMENT)
    }
    assert len(all_exercises()) == len(EXERCISES) + len(bugs())
    assert len(bugs()) > 130


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.mutant)
def test_a_file_has_the_mistake_under_the_lessons_name_and_does_not_tell_it(bug):
    text = generated(bug)
    names = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert bug.function in names
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert not {alias.asname or alias.name for node in imports for alias in node.names} & set(names)
    mutant = described()[bug.mutant]
    for telltale in ("mutant", bug.mutant, mutant.killer, *mutant.cause):
        assert telltale not in text
    _, _, explanation = mutant.doc.partition(": ")
    assert not explanation or explanation not in text.replace("\n", " ") or explanation in bug.symptom
    assert bug.symptom.endswith(".") and len(bug.symptom) > 12
    assert len(set(bug.hints)) == 3
    assert mutant.doc in bug.hints[1] or mutant.doc.startswith(bug.symptom[:-1])
    assert bug.hints[0].startswith("It should be so: ") and "tests/" not in bug.hints[0]
    assert ast.parse(solution(bug)).body and solution(bug).startswith("# The mistake: ")


def test_a_sentence_says_what_works_and_what_is_wrong_by_what_the_mistake_is_in():
    assert SUMMED.in_what_way == "It trains, and it is wrong."
    assert BY_MUTANT["exchanged_values_run_code"].in_what_way == "It works, and it is not safe."
    assert "as long as there is no error" in BY_MUTANT["neighbour_blamed"].in_what_way
    assert "saves and loads checkpoints" in BY_MUTANT["checkpoint_only_measured"].in_what_way
    for kinds, _ in WRONG_IN_WHAT_WAY:
        for kind in kinds:
            assert any(bug.target.startswith(kind) for bug in bugs()), kind


def test_the_difficulty_grows_with_the_lines_to_read_and_to_write_and_with_a_slow_link():
    assert {bug.difficulty for bug in bugs()} == {1, 2, 3, 4, 5}
    assert BY_MUTANT["bucket_divided_twice"].difficulty == 1  # one line, which the lesson has in another way
    assert BY_MUTANT["zero_clipped_by_torch"].minutes == 10
    assert BY_MUTANT["pipeline_receives_in_order_of_need"].difficulty == 5
    right = ast.parse("def work():\n    a()\n    b()").body[0]
    wrong = ast.parse("def work():\n    a()")
    at_once = "tests/exercises/test_find_the_bug.py::no_such_test"
    slow = BY_MUTANT["bucket_not_waited_for"].tests[0]
    assert difficulty_of(wrong, "work", right, at_once) == 1
    assert difficulty_of(wrong, "work", right, slow) == 2


def test_hints_lead_from_what_should_be_so_to_the_line():
    assert SUMMED.hints == (
        "It should be so: a gradient is the mean over ranks and not their sum. Which line is responsible for "
        "that, or is it missing?",
        "What happens: Gradients are summed, not averaged: with SGD training diverges on many ranks, and "
        "Adam hides the error.",
        "Look at this line, and at what follows from it: `for parameter in self.module.parameters():`",
    )
    blamed = BY_MUTANT["neighbour_blamed"]  # whose docstring is the symptom
    assert blamed.symptom not in blamed.hints[1] and "calls `_of_this_process.cause`" in blamed.hints[1]


def test_a_file_that_uses_a_pattern_says_what_that_is():
    assert "`pattern` names the algorithm of a collective" in generated(SUMMED)
    assert "`pattern`" not in generated(BY_MUTANT["mean_divided_twice"])


def test_a_file_that_was_not_changed_and_one_without_the_function_need_no_tests(tmp_path):
    file = tmp_path / "bug.py"
    file.write_text(generated(SUMMED) + "# a comment mends nothing\n")
    result = grade(SUMMED, file)
    assert (result.state, result.credit) == ("unsolved", 0.0)
    assert "the mistake is still there" in result.sentence
    assert "After a change, also a wrong one" in result.sentence
    file.write_text("x = 1\n")
    assert grade(SUMMED, file).sentence.endswith("has no `finish_gradient_sync`.")


@pytest.mark.parametrize(
    "mutant, wrong, right",
    [
        ("gradient_summed", "op='sum'", "op='mean'"),
        ("overlap_hooks_capture_the_loop_variable", "lambda _:", "lambda _, parameter=parameter:"),
        ("unused_get_zeros", "parameter.grad = bucket.views[parameter]", "pass"),
    ],
)
def test_the_file_fails_the_killer_and_passes_it_once_mended(tmp_path, mutant, wrong, right):
    bug = BY_MUTANT[mutant]
    file = tmp_path / f"{bug.name}.py"
    for text, is_mended in ((generated(bug), False), (generated(bug).replace(wrong, right), True)):
        file.write_text(text)
        with apply(load(bug, file)):
            _, error = run_tests(bug, bug.tests[0])
        assert (error is None) == is_mended, error


def test_a_test_that_the_short_implementation_never_passed_is_not_asked_for(monkeypatch):
    killer, lacking, broken = SUMMED.tests[:3]
    before = Grade(SUMMED.name, "failed", "", (broken,), (lacking,))
    monkeypatch.setattr(exercises.checker.grade, "judge", lambda bug, file: before)
    mended = Grade(SUMMED.name, "failed", "It lacks a flag.", (killer, broken), (lacking,))
    assert (excused(SUMMED, mended).state, excused(SUMMED, mended).credit) == ("passed", 1.0)
    assert f'"{name_of(lacking)}" fails as it did before' in excused(SUMMED, mended).sentence
    exchanged = Grade(SUMMED.name, "failed", "It breaks.", (killer,), (lacking, broken))
    assert excused(SUMMED, exchanged) == dataclasses.replace(exchanged, failed=(broken,))
    still_wrong = Grade(SUMMED.name, "failed", "It sums.", (), SUMMED.tests)
    assert excused(SUMMED, still_wrong) is still_wrong


def test_the_command_makes_the_file_once_and_keeps_what_was_written(tmp_path, capsys):
    space = Workspace(tmp_path)
    assert main(["bug", SUMMED.name], space) == 0
    assert SUMMED.symptom in capsys.readouterr().out
    space.file(SUMMED).write_text("mine\n")
    assert main(["bug", SUMMED.name], space) == 0
    assert space.file(SUMMED).read_text() == "mine\n"
    assert main(["reset", SUMMED.name], space) == 0
    assert (tmp_path / ".saved" / f"{SUMMED.name}.1.py").read_text() == "mine\n"


def test_the_list_tells_symptoms_and_the_next_bug_follows(tmp_path, capsys):
    space = Workspace(tmp_path)
    assert main(["bugs"], space) == 0
    assert f"0 of {len(bugs())} are mended" in capsys.readouterr().out
    space.record(Grade(bugs()[0].name, "passed", "", ("one",)))
    assert space.next_bug() == bugs()[1]
    assert main(["bug"], space) == 0
    assert bugs()[1].name in capsys.readouterr().out
    assert main(["bug", EXERCISES[0].name], space) == 2


@pytest.mark.parametrize(
    "misspelt, nearest",
    [
        ("ring_al_gather", "ring_all_gather"),
        ("1f1b", "pipeline_1f1b"),
        (SUMMED.name[:-1], SUMMED.name),
        ("qqq", None),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest_one(misspelt, nearest):
    with pytest.raises(LookupError) as error:
        exercise_named(misspelt)
    assert ("did you mean" in str(error.value)) == (nearest is not None)
    assert nearest is None or f"did you mean {nearest}?" in str(error.value)
    assert nearest is None or exercise_named(nearest).name == nearest


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
    with pytest.raises(LookupError, match="is about a class; mend it in its file"):
        show_in_a_notebook(BY_MUTANT["unused_get_zeros"].name)


def test_a_solution_tells_the_mistake_and_marks_the_lines_that_differ():
    text = solution(BY_MUTANT["gradient_summed"])
    assert BY_MUTANT["gradient_summed"].mistake.split()[-1] in text.partition("# The lesson's own code:")[0]
    alike = solution(next(bug for bug in bugs() if "# What to change" in solution(bug)))
    marks = {line[:5] for line in alike.splitlines() if line.startswith("#   ")}
    assert "#   -" in marks or "#   +" in marks
