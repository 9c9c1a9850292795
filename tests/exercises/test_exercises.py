"""Every exercise is described completely.

That its tests fail without the learner's code, and pass with the lesson's, is tested in end_to_end.
"""

import ast
import importlib
import re

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.catalog.comm import MESSAGES, WIRE
from exercises.checker.grade import grade
from exercises.generate import generated
from exercises.lesson_source import definition, find, helpers
from tests.exercises.in_process import solved

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
CLOSED = [exercise for exercise in EXERCISES if not exercise.stub]
EACH_CLOSED = pytest.mark.parametrize("exercise", CLOSED, ids=lambda exercise: exercise.name)


@EACH
def test_the_grade_of_an_untouched_file_names_what_is_missing(exercise, tmp_path):
    file = tmp_path / f"{exercise.name}.py"
    file.write_text(generated(exercise))
    result = grade(exercise, file)
    assert (result.state, result.exit_code, result.credit) == ("unsolved", 1, 0.0)
    assert exercise.function in result.sentence


@EACH
def test_it_is_described_completely(exercise):
    assert 1 <= exercise.difficulty <= 5
    assert 5 <= exercise.minutes <= 120
    assert len(exercise.hints) == len(set(exercise.hints)) == 3
    assert all(hint.endswith((".", "?")) for hint in exercise.hints)
    assert exercise.tests
    earlier = list(BY_NAME)[: list(BY_NAME).index(exercise.name)]
    assert set(exercise.needs) <= set(earlier)


@EACH
def test_the_tests_that_grade_it_exist(exercise):
    for test in exercise.tests:
        file, _, name = test.partition(".py::")
        name, _, case = name.partition("[")
        function = getattr(importlib.import_module(file.replace("/", ".")), name)
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        if case:
            [values] = [mark.kwargs.get("ids") or mark.args[1] for mark in marks]
            assert case.removesuffix("]") in map(str, values), test


def test_the_first_exercise_is_the_easiest_of_lesson_1_and_no_two_have_one_name():
    assert (EXERCISES[0].name, EXERCISES[0].difficulty) == ("send_and_receive", 1)
    assert len(BY_NAME) == len({exercise.file for exercise in EXERCISES}) == len(EXERCISES) == 60


@EACH_CLOSED
def test_what_it_imports_is_what_the_lessons_code_needs(exercise):
    tree = ast.parse(solved(exercise))
    imported = [node.names for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.asname or alias.name.partition(".")[0] for names in imported for alias in names]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(names) <= used and len(names) == len(set(names))


def functions_of(exercise) -> list[ast.FunctionDef]:
    return [definition(exercise, target) for target in exercise.targets]


@EACH_CLOSED
def test_it_names_a_notebook_and_at_most_five_helpers_beside_comm(exercise):
    text = " ".join(ast.get_docstring(ast.parse(generated(exercise))).split())
    assert (ROOT / "notebooks" / f"{exercise.notebook}.ipynb").is_file()
    assert f"Read notebooks/{exercise.notebook}.ipynb first. Do not open" in text
    found = helpers(exercise, functions_of(exercise))
    of_comm = {*WIRE, *MESSAGES}
    others = [one.shown for one in found if not one.module.startswith("comm.")]
    others += [one for one in exercise.helps if one not in of_comm]
    assert len(others) <= 5
    for one in others:  # a signature, a type or a constant's value
        assert re.match(r"[\w.]+(?:, [\w.]+)*(?:\(|: | = )", one), one
    assert not {exercise.qualified(target) for target in exercise.targets} & {one.name for one in found}
    assert all(one.shown in generated(exercise).replace("\n    ", "\n") for one in found)


@EACH_CLOSED
def test_what_its_solution_uses_of_an_object_is_listed_and_no_docstring_has_a_bare_attribute(exercise):
    text = generated(exercise)
    head, *docs = re.findall(r'"""(.*?)"""', text, re.DOTALL)
    for path in re.findall(r"`((?:self|bucket|row|sequence|tensor|pipeline|sizes)\.[\w.]+)", " ".join(docs)):
        assert path in head, path
    for function in functions_of(exercise):
        kinds = {one.arg: ast.unparse(one.annotation or one) for one in function.args.args}
        objects = {name for name, kind in kinds.items() if name != "ctx" and "Tensor" not in kind}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in objects - {"module", "model"}:
                assert node.attr in text, f"{ast.unparse(node)} stands in no docstring and not in helps"


def test_helpers_come_with_their_parameters_and_the_first_sentence_of_their_docstring():
    exercise = BY_NAME["ring_reduce_scatter"]
    combine, *_ = helpers(exercise, functions_of(exercise))
    assert (combine.name, combine.module) == ("combine", "comm.algorithms.reduction")
    assert combine.shown == (
        "combine(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None\n"
        "    Write a (op) b, elementwise, to `out`, which may be `a` or `b`."
    )
    assert find("comm.algorithms.ring", "send_quickly") is None
