"""Find an exercise by its name, also one that asks to find a bug, and suggest one for a misspelt name."""

import difflib
import functools
import re

from exercises.catalog import BY_NAME, Exercise
from exercises.find_the_bug import bugs
from exercises.typed import typed


@functools.cache
def all_exercises() -> dict[str, Exercise]:
    """Return all exercises by name: those that ask to write a function, then those with a bug."""
    return BY_NAME | {bug.name: bug for bug in bugs()}


def exercise_named(name: str) -> Exercise:
    """Return an exercise. If there is none, raise LookupError with a sentence that has the nearest name."""
    if (found := all_exercises().get(name)) is not None:
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
