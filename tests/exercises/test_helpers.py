"""Each exercise's file names the notebook to read first, and every helper that its solution uses."""

import ast

import pytest

from exercises.catalog import BY_NAME, EXERCISES, ROOT
from exercises.generate import definition, generated
from exercises.helpers import helpers
from exercises.lesson_source import find, is_lesson
from tests.exercises.in_process import solved

EACH = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


def listed(name):
    exercise = BY_NAME[name]
    tree = ast.parse(exercise.lesson.read_text())
    return helpers(exercise, [definition(tree, exercise, target) for target in exercise.targets])


def introduction(exercise):
    return ast.get_docstring(ast.parse(generated(exercise)))


@EACH
def test_it_names_a_notebook_and_asks_to_leave_the_lesson_closed(exercise):
    text = " ".join(introduction(exercise).split())
    assert (ROOT / "notebooks" / f"{exercise.notebook}.ipynb").is_file()
    assert f"Read notebooks/{exercise.notebook}.ipynb first" in text
    assert exercise.page in text and (ROOT / exercise.page).exists()
    assert f"Do not open {exercise.lesson.relative_to(ROOT)} yet: it contains the solution." in text


@EACH
def test_it_describes_each_function_of_the_lessons_that_its_solution_calls(exercise):
    tree = ast.parse(solved(exercise))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and is_lesson(node.module)
        for alias in node.names
    }
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {ast.unparse(function) for function in calls} & imported
    text = generated(exercise)
    missing = {name for name in called if f"    {name}" not in text and f"`{name}" not in text}
    assert not missing


@EACH
def test_no_helper_is_listed_twice_or_is_the_solution_itself(exercise):
    lines = listed(exercise.name)
    signatures = [line.partition("\n")[0] for line in lines]
    assert len(set(signatures)) == len(signatures)
    own = {exercise.qualified(target) for target in exercise.targets}
    assert not own & {signature.partition("(")[0] for signature in signatures}


def test_a_message_is_explained_from_its_start_to_the_wait():
    text = "\n".join(listed("send_and_receive"))
    for expected in (
        "wire.isend(tensor: torch.Tensor, dst: int) -> Transfer",
        "wire.irecv(tensor: torch.Tensor, src: int) -> Transfer",
        "transfer.wait() -> None",
        "wire.rank: int\n    This rank's number in the group, from 0.",
        "wire.size: int\n    The number of ranks.",
    ):
        assert expected in text


def test_helpers_come_with_their_parameters_and_the_first_sentence_of_their_docstring():
    combine, *_ = listed("ring_reduce_scatter")
    assert combine.startswith(
        "combine(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None\n"
    )
    assert combine.endswith("Write a (op) b, elementwise, to `out`, which may be `a` or `b`.")


def test_attributes_are_found_through_the_class_of_their_object():
    text = "\n".join(listed("zero2"))
    assert "bucket.layout.add_gradient(shards: list[ParameterShard]" in text  # of what Bucket makes
    assert "work.wait()" in "\n".join(listed("zero1"))  # of what all_gather returns


def test_a_helper_that_does_not_exist_is_an_error():
    with pytest.raises(LookupError, match="does not exist"):
        find("comm.wire.wire.Wire.send_quickly")
