"""Solve an exercise, and grade it in this process, whose ranks have imported everything before they start."""

import importlib

from exercises.catalog import Exercise
from exercises.checker.plugin import short_hangs
from exercises.generate import generated, solution


def solved(exercise: Exercise) -> str:
    """Return the exercise's file with the lesson's own functions."""
    imports, _, _ = generated(exercise).partition("\n\n\ndef ")
    return f"{imports}\n\n\n{solution(exercise)}"


def run_tests(exercise: Exercise, *tests: str) -> tuple[str, BaseException | None]:
    """Run these tests of the exercise, or all, in this process. Return the last one and its error."""
    for test in tests or exercise.tests:
        file, _, name = test.partition(".py::")
        name, _, parameter = name.partition("[")
        function = getattr(importlib.import_module(file.replace("/", ".")), name)
        arguments = arguments_of(function, parameter.rstrip("]"))
        try:
            with short_hangs():
                function(**arguments)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return test, error
    return test, None


def arguments_of(function, identity: str) -> dict[str, object]:
    """Return the arguments of a test with one parameter, from its value as pytest writes it."""
    if not identity:
        return {}
    (mark,) = function.pytestmark
    values = list(mark.args[1])
    names = map(str, mark.kwargs.get("ids", values))
    return {mark.args[0]: dict(zip(names, values, strict=True))[identity]}
