"""Grade a function that was defined in a notebook's cell: `check(reduce_chunks, "ring_reduce_scatter")`.

If an exercise has several functions, `check` takes one of them, and finds the others in the same notebook.
"""

import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from exercises.catalog import BY_NAME, PICKLE, Exercise, name_of
from exercises.checker.explain import name_of as words_of
from exercises.checker.grade import INVALID, PASSED, Grade, judge
from exercises.find_the_bug import Bug
from exercises.names import all_exercises, exercise_named, typed


class NoSuchExercise(LookupError):
    """A name that is no exercise's. IPython shows the text without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def check(function: Callable[..., Any], name: str | None = None) -> Grade:
    """Print and return the grade of a function. Without `name` its own name says which exercise it solves.

    The function replaces the lesson's on every rank, and the lesson's tests judge it, as in
    `python -m exercises check`. Raise NoSuchExercise, a LookupError, if there is no such exercise.
    """
    exercise = _exercise_of(name or function.__name__)
    cells = {**getattr(function, "__globals__", {}), function.__name__: function}
    functions = {target: cells.get(name_of(target)) for target in exercise.also}
    functions = {exercise.target: cells.get(exercise.function) if exercise.also else function, **functions}
    if (problem := _problem_of(exercise, functions)) is None:
        with tempfile.TemporaryDirectory(prefix="cell-") as folder:
            file = Path(folder, exercise.name + PICKLE)
            file.write_bytes(cloudpickle.dumps(functions))
            result = judge(exercise, file)
    else:
        result = Grade(exercise.name, INVALID, problem, failed=exercise.tests)
    others = [f"{words_of(test)}: {reason}" for test, reason in result.reasons.items()]
    told = [f"{result.name}: {result.state}. {result.sentence}", result.drawing, *others]
    if result.state == PASSED:
        told.append(f"A cell is no file: to hand the code in, save it in exercises/{exercise.file}.")
    print("\n".join(filter(None, told)))
    return result


def bug(name: str) -> None:
    """Print the symptom of a wrong implementation, and put its code into the next cell of the notebook.

    Fix it there, run the cell, and grade it: `check(the_function, name)`. Raise LookupError if there is no
    such exercise.
    """
    exercise = _exercise_of(name)
    if not isinstance(exercise, Bug):
        raise NoSuchExercise(f"{name} asks you to write a function; `{typed('bugs')}` lists bugs.")
    call = f"check({exercise.function}, {name!r})"
    code = f"from exercises.notebook import check\n\n{exercise.own_file()}\n{call}"
    ipython = sys.modules.get("IPython")
    if ipython is not None and (shell := ipython.get_ipython()) is not None:
        shell.set_next_input(code)
        code = "The code is in the next cell."
    print(f"{exercise.symptom}\n{code}")


def _exercise_of(name: str) -> Exercise:
    """Return the exercise of this name, or the only one that has a function of this name."""
    if name not in all_exercises():
        found = [one for one in BY_NAME.values() if name in map(name_of, one.targets)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(one.name for one in found)
            raise NoSuchExercise(f"Several exercises have a function {name!r}: {names}. Give one of them.")
    try:
        return exercise_named(name)
    except LookupError as error:
        raise NoSuchExercise(error.args[0]) from None


def _problem_of(exercise: Exercise, functions: dict[str, Any]) -> str | None:
    for target, function in functions.items():
        if isinstance(exercise, Bug) or exercise.stub:
            continue  # a wrong implementation need not have the lesson's parameters
        if not callable(function):
            return f"There is no function `{name_of(target)}` in the notebook; {exercise.name} needs it, too."
        original: Any = importlib.import_module(exercise.module)
        for part in exercise.qualified(target).split("."):
            original = getattr(original, part)
        wanted, got = _parameters(original), _parameters(function)
        if wanted != got:
            names = [", ".join(parameter[0] for parameter in parameters) for parameters in (wanted, got)]
            of = f" of `{name_of(target)}`" if exercise.also else ""
            return f"The parameters{of} must be ({names[0]}), but they are ({names[1]})."
    return None


def _parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Return each parameter's name, kind and default; annotations do not matter."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
