"""Solve an exercise, and grade it in this process, whose ranks have imported everything before they start."""

from exercises.catalog import Exercise, name_of
from exercises.checker.compared import compared_in
from exercises.checker.run_tests import error_of
from exercises.generate import generated, solution
from exercises.lesson_source import imports, part_of
from lab import ranks

ranks.describe = compared_in


def solved(exercise: Exercise) -> str:
    """Return the exercise's file with the lesson's own functions."""
    needed, _, _ = generated(exercise).partition("\n\n\ndef ")
    if exercise.stub:
        parts = [part_of(exercise, target) for target in exercise.targets]
        needed = imports(exercise, parts, own=map(name_of, exercise.targets))
    return f"{needed}\n\n\n{solution(exercise)}"


def run_tests(exercise: Exercise, *tests: str) -> tuple[str, BaseException | None]:
    """Run these tests of the exercise, or all, until one fails. Return the last one and its error."""
    for test in tests or exercise.tests:
        if (error := error_of(test)) is not None:
            return test, error
    return test, None
