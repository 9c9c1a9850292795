"""Show where a learner's schedule differs from the lesson's: the table, with the first wrong cell marked."""

import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from exercises.catalog import Exercise
from pipeline_parallel.actions import Action, Table
from pipeline_parallel.analysis.validate import grid

SCHEDULES = "pipeline_parallel.schedules"
SIZES = ((1, 1), (2, 2), (2, 3), (3, 4), (4, 2), (4, 6))  # ranks, microbatches
CHUNKS = 2
LEGEND = (
    "0B1 is the backward of microbatch 1 in stage 0; a slot is a place in a row, and the first is slot 0."
)


def originals(exercise: Exercise) -> dict[str, Callable[..., Any]]:
    """Return the lesson's own functions that return a schedule, by name; call it before they are replaced."""
    if exercise.module != SCHEDULES:
        return {}
    lesson = importlib.import_module(exercise.module)
    names = [exercise.qualified(target) for target in exercise.targets]
    return {name: getattr(lesson, name) for name in names if hasattr(lesson, name)}


def wrong_table(original: Callable[..., Any], written: Callable[..., Any]) -> str | None:
    """Return the smallest table that is wrong, with a sentence before it, or None if all are right.

    A table is wrong here if it differs from the lesson's, so this is for a function that has failed a test.
    """
    for ranks, microbatches in SIZES:
        sizes = {"microbatches": microbatches, "stages": ranks, "ranks": ranks, "chunks": CHUNKS}
        with suppress(Exception, SystemExit):
            names = inspect.signature(original).parameters
            arguments = {name: sizes[name] for name in names}
            expected, got = original(**arguments), written(**arguments)
            call = f"{original.__name__}({', '.join(str(value) for value in arguments.values())})"
            if (text := refused(got, call) or marked(expected, got, call)) is not None:
                return text
    return None


def refused(got: Any, call: str) -> str | None:
    """Return a sentence if the result is not a list of rows of actions, else None."""
    rows = got if isinstance(got, list | tuple) else [got]
    if all(isinstance(row, list | tuple) and all(isinstance(one, Action) for one in row) for row in rows):
        return None
    inside = f" of `{type(got[0]).__name__}`" if rows is got else ""
    return (
        f"{call} returns a `{type(got).__name__}`{inside}, and must return a list with one row for each "
        "rank: each a list of actions such as Action(FORWARD, microbatch, stage)."
    )


def marked(expected: Table, got: Table, call: str) -> str | None:
    """Return the table that was got, with its first wrong cell in brackets, or None if it is right."""
    if len(got) != len(expected):
        return f"{call} has {len(got)} rows, and not {len(expected)}, one for each rank."
    for slot in range(max(len(row) for row in expected) + 1):
        for rank, (right, wrong) in enumerate(zip(expected, got, strict=True)):
            one, other = _at(right, slot), _at(wrong, slot)
            if one != other:
                found = "ends there" if other is None else f"has {other} there{_too_many(expected, other)}"
                where = f"rank {rank}, slot {slot}: {one or 'no action'} is expected"
                sentence = f"{call}, {where}, but the row {found}."
                notes = {rank: f"expected in slot {slot}: {one or 'the end'}"}
                return f"{sentence}\n{grid(got, [(rank, slot)], notes)}\n{LEGEND}"
    return None


def _too_many(expected: Table, action: Any) -> str:
    """Return how a sentence ends if an action's microbatch does not exist, else nothing."""
    count = 1 + max(one.microbatch for row in expected for one in row)
    asked = getattr(action, "microbatch", 0)
    numbers = "only 1 microbatch" if count == 1 else f"only {count} microbatches"
    return f", and the call has {numbers}, numbered from 0" if asked >= count else ""


def _at(row: list[Any], slot: int) -> Any:
    return row[slot] if slot < len(row) else None
