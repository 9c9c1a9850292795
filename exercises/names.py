"""Find an exercise by its name, suggest one for a misspelt name, and say how a command is typed."""

import difflib
import functools
import os
import re

from exercises.catalog import BY_NAME, Exercise
from exercises.find_the_bug import bugs

BY_MAKE = "EXERCISES_BY_MAKE"  # the Makefile sets this variable


@functools.cache
def all_exercises() -> dict[str, Exercise]:
    """Return all exercises by name: those that ask to write a function, then those with a bug."""
    return BY_NAME | {bug.name: bug for bug in bugs()}


def exercise_named(name: str) -> Exercise:
    """Return an exercise. If there is none, raise LookupError with a sentence that has the nearest name."""
    if (found := BY_NAME.get(name) or all_exercises().get(name)) is not None:  # bugs take a second
        return found
    raise LookupError(
        f"There is no exercise {name!r}{suggestion(name)} "
        f"`{typed('list')}` shows all, and `{typed('bugs')}` those with a bug."
    )


def suggestion(name: str) -> str:
    """Return how a sentence about an unknown name ends: ": did you mean zero1?", or with a full stop."""
    parts = [known for known in BY_NAME if len(name) >= 3 and name in known]
    same = [known for known in BY_NAME if known.replace("_", "") == re.sub(r"[\W_]", "", name).lower()]
    near = same or difflib.get_close_matches(name, all_exercises(), n=1) or parts[:1]
    return f": did you mean {near[0]}?" if near else "."


def typed(arguments: str) -> str:
    """Return the command with these arguments: "python -m exercises check zero1", or the one of make."""
    return (
        f"make exercises ARGS='{arguments}'" if BY_MAKE in os.environ else f"python -m exercises {arguments}"
    )
