"""Grade a function that was defined in a notebook's cell: `check(reduce_chunks, "ring_reduce_scatter")`.

If an exercise has several functions, `check` takes one of them, and finds the others in the same notebook.
"""

import difflib
import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from exercises.catalog import BY_NAME, Exercise, name_of
from exercises.checker.grade import INVALID, Grade, judge
from exercises.checker.plugin import PICKLE
from exercises.find_the_bug import Bug
from exercises.names import all_exercises, exercise_named, suggestion, typed


class NoSuchExercise(LookupError):
    """A name that is no exercise's. IPython shows the text without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Interrupted(KeyboardInterrupt):
    """The stop button or Ctrl-C has ended a check. IPython shows the text without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def check(function: Callable[..., Any], name: str | None = None) -> Grade:
    """Print and return the grade of a function. Without `name` its own name says which exercise it solves.

    The function replaces the lesson's on every rank, and the lesson's tests judge it, as in
    `python -m exercises check`. Raise NoSuchExercise, a LookupError, if there is no such exercise.
    """
    try:
        return _check(function, name)
    except KeyboardInterrupt:
        raise Interrupted("The check was interrupted, and has graded nothing.") from None


def _check(function: Callable[..., Any], name: str | None) -> Grade:
    exercise = _exercise_of(name or function.__name__)
    functions = _functions_of(exercise, function)
    if (problem := _problem_of(exercise, functions)) is None:
        with tempfile.TemporaryDirectory(prefix="cell-") as folder:
            file = Path(folder, exercise.name + PICKLE)
            file.write_bytes(cloudpickle.dumps(functions))
            result = judge(exercise, file)
    else:
        result = Grade(exercise.name, INVALID, problem, failed=exercise.tests)
    print("\n".join(filter(None, (f"{result.name}: {result.state}. {result.sentence}", result.drawing))))
    return result


def bug(name: str) -> None:
    """Print the symptom of a wrong implementation, and put its code into the next cell of the notebook.

    Mend it there, run the cell, and grade it: `check(the_function, name)`. Raise LookupError if there is no
    such exercise.
    """
    try:
        exercise = exercise_named(name)
    except LookupError as error:
        raise NoSuchExercise(error.args[0]) from None
    if not isinstance(exercise, Bug):
        raise NoSuchExercise(f"{name} asks you to write a function; `{typed('bugs')}` lists bugs.")
    if exercise.is_class:
        raise NoSuchExercise(f"{name} is about a class; mend it in its file: `{typed(f'bug {name}')}`.")
    code = (
        f"from exercises.notebook import check\n\n{exercise.own_file()}\ncheck({exercise.function}, {name!r})"
    )
    ipython = sys.modules.get("IPython")
    if ipython is not None and (shell := ipython.get_ipython()) is not None:
        shell.set_next_input(code)
        code = "The code is in the next cell."
    print(f"{exercise.symptom} {exercise.in_what_way}\n{code}")


def _exercise_of(name: str) -> Exercise:
    if name in all_exercises():
        return exercise_named(name)
    found = [exercise for exercise in BY_NAME.values() if _has(exercise, name)]
    if len(found) != 1:
        raise NoSuchExercise(_ambiguous(name, found) if found else _unknown(name))
    return found[0]


def _ambiguous(name: str, found: list[Exercise]) -> str:
    names = ", ".join(exercise.name for exercise in found)
    return (
        f"Several exercises have a function {name!r}: {names}. Give the exercise's name, as in "
        f"check({name}, {found[0].name!r})."
    )


def _unknown(name: str) -> str:
    functions = {name_of(target) for exercise in BY_NAME.values() for target in exercise.targets}
    near = suggestion(name)
    if close := difflib.get_close_matches(name, functions, n=1):
        near = f": did you mean {close[0]}?"
    if near != ".":
        return f"There is no exercise, and no function of one, with the name {name!r}{near}"
    return f"There is no exercise with a function {name!r}; `{typed('list')}` shows the exercises."


def _has(exercise: Exercise, function: str) -> bool:
    return function in map(name_of, exercise.targets)


def _functions_of(exercise: Exercise, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the functions of an exercise by target; the ones that the notebook does not have are None."""
    if not exercise.also:
        return {exercise.target: function}
    cells = {**getattr(function, "__globals__", {}), function.__name__: function}
    return {target: cells.get(name_of(target)) for target in exercise.targets}


def _problem_of(exercise: Exercise, functions: dict[str, Any]) -> str | None:
    for target, function in functions.items():
        if isinstance(exercise, Bug):
            continue  # a wrong implementation need not have the lesson's parameters
        if not callable(function):
            return f"There is no function `{name_of(target)}` in the notebook; {exercise.name} needs it, too."
        wanted, got = _parameters(_original(exercise, target)), _parameters(function)
        if wanted != got:
            names = [", ".join(parameter[0] for parameter in parameters) for parameters in (wanted, got)]
            of = f" of `{name_of(target)}`" if exercise.also else ""
            return f"The parameters{of} must be ({names[0]}), but they are ({names[1]})."
    return None


def _original(exercise: Exercise, target: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(exercise.module)
    for part in exercise.qualified(target).split("."):
        found = getattr(found, part)
    return found


def _parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Return each parameter's name, kind and default; annotations do not matter."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
