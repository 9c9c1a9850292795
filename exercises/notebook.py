"""Grade a function that was defined in a notebook's cell: `check(reduce_chunks, "ring_reduce_scatter")`."""

import importlib
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from exercises.catalog import BY_NAME, Exercise
from exercises.grade import INVALID, Grade, judge
from exercises.replacing_plugin import PICKLE


def check(function: Callable[..., Any], name: str | None = None) -> Grade:
    """Print and return the grade of a function. Without `name` its own name says which exercise it solves.

    The function replaces the lesson's on every rank, and the lesson's tests judge it, as in
    `python -m exercises check`. Raise LookupError if there is no such exercise.
    """
    exercise = _exercise_of(name or function.__name__)
    wanted, got = _parameters(_original(exercise)), _parameters(function)
    if wanted == got:
        with tempfile.TemporaryDirectory(prefix="cell-") as folder:
            file = Path(folder, exercise.name + PICKLE)
            file.write_bytes(cloudpickle.dumps(function))
            result = judge(exercise, file)
    else:
        names = [", ".join(parameter[0] for parameter in parameters) for parameters in (wanted, got)]
        sentence = f"The parameters must be ({names[0]}), but they are ({names[1]})."
        result = Grade(exercise.name, INVALID, sentence, failed=exercise.tests)
    print(f"{result.name}: {result.state}. {result.sentence}")
    return result


def _exercise_of(name: str) -> Exercise:
    found = [BY_NAME[name]] if name in BY_NAME else [e for e in BY_NAME.values() if e.function == name]
    if len(found) != 1:
        problem = "Several exercises have a function" if found else "There is no exercise with a function"
        raise LookupError(f"{problem} {name!r}; give the exercise's name: {', '.join(BY_NAME)}.")
    return found[0]


def _original(exercise: Exercise) -> Callable[..., Any]:
    found: Any = importlib.import_module(exercise.module)
    for part in exercise.qualified_name.split("."):
        found = getattr(found, part)
    return found


def _parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Return each parameter's name, kind and default; annotations do not matter."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
