"""Each exercise's file explains, in few names, what its solution uses of the lessons."""

import ast

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.generate import definition, generated
from exercises.helpers import Helper, find, helpers

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


def functions_of(exercise) -> list[ast.FunctionDef]:
    tree = ast.parse(exercise.lesson.read_text())
    return [definition(tree, exercise, target) for target in exercise.targets]


def listed(exercise) -> list[Helper]:
    return helpers(exercise, functions_of(exercise))


@EACH
def test_it_names_a_notebook_and_asks_to_leave_the_lesson_closed(exercise):
    text = " ".join(ast.get_docstring(ast.parse(generated(exercise))).split())
    assert (ROOT / "notebooks" / f"{exercise.notebook}.ipynb").is_file()
    assert f"Read notebooks/{exercise.notebook}.ipynb first" in text
    assert f"Do not open {exercise.lesson.relative_to(ROOT)} yet: it has the solution." in text


@EACH
def test_beside_comm_at_most_five_names_of_the_lessons_help_and_none_is_the_solution(exercise):
    found = listed(exercise)
    assert len([one for one in found if not one.module.startswith("comm.")]) <= 5
    assert not {exercise.qualified(target) for target in exercise.targets} & {one.name for one in found}
    assert all(one.shown in generated(exercise).replace("\n    ", "\n") for one in found)


@EACH
def test_what_its_solution_uses_of_an_object_is_explained(exercise):
    text = generated(exercise)
    for function in functions_of(exercise):
        kinds = {one.arg: ast.unparse(one.annotation or one) for one in function.args.args}
        objects = {name for name, kind in kinds.items() if name != "ctx" and "Tensor" not in kind}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in objects - {"module", "model"}:
                assert node.attr in text, f"{ast.unparse(node)} stands in no docstring and not in helps"


def test_helpers_come_with_their_parameters_and_the_first_sentence_of_their_docstring():
    combine, *_ = listed(BY_NAME["ring_reduce_scatter"])
    assert (combine.name, combine.module) == ("combine", "comm.algorithms.reduction")
    assert combine.shown == (
        "combine(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None\n"
        "    Write a (op) b, elementwise, to `out`, which may be `a` or `b`."
    )
    assert find("comm.algorithms.ring", "send_quickly") is None
