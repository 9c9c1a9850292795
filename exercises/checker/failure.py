"""Describe the error of a failed test: where it happened, what differs, and what has probably caused it."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from exercises.checker.causes import Evidence, likely_cause
from exercises.checker.compared import DATACLASS, MAX_TEXT, Compared, compared_in, shown
from exercises.checker.explain import name_of
from exercises.checker.relations import wrong_values
from lab.ranks import RankError
from lab.ranks.waiting import Wait, drawn

_NAMES_VALUES = re.compile(r"\b(not|expected|got|instead of)\b")
_WAITED = re.compile(r"rank (\d+) could not (send to|receive from) rank (\d+): it waited until the timeout")
LIMITS = {"<=": "at most ", "<": "less than ", ">=": "at least ", ">": "more than ", "in": "one of "}


def failure_of(error: BaseException, test: str = "", table: str | None = None) -> dict[str, Any]:
    """Return what grade.py needs to know about an error: where it happened, what differs, what may cause it.

    `test` is the failed test's id, and `table` the learner's wrong schedule, which begins with a sentence.
    """
    rank: int | None = None
    compared: Mapping[Any, Compared] = {None: compared_in(error)}
    waited = _WAITED.findall(str(error))
    waits = {int(one): Wait(action, int(peer)) for one, action, peer in waited}
    if isinstance(error, RankError):
        rank, compared, waits = error.rank, error.described, error.waits or waits
    difference, drawing = shown_difference(compared, rank), drawn(waits) if waits else ""
    difference = difference and DATACLASS.sub(r"\1", difference)
    if table:
        difference, _, drawing = table.partition("\n")
    return {
        "rank": rank,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "difference": difference,
        "is_error": not any(one.pairs or one.is_plain for one in compared.values()),
        "cause": likely_cause(Evidence(name_of(test), str(error), own_failures(compared), waits, table)),
        "drawing": drawing,
    }


def own_failures(compared: Mapping[int | None, Compared]) -> dict[int | None, Compared]:
    """Leave out the ranks that only failed because another one had died."""
    return {
        rank: one
        for rank, one in compared.items()
        if one.pairs or one.is_plain or "has died or left" not in one.message
    }


def shown_difference(compared: Mapping[int | None, Compared], rank: int | None) -> str | None:
    """Return what one rank has compared: "gradient `weight`: 3 times what it should be (...)".

    The value with the clearest relation is shown, and of the others the number. None says that nothing is
    known of what was compared.
    """
    one = compared.get(rank) or next(iter(compared.values()), None)
    if one is None:
        return None
    if one.message and (not one.pairs or _NAMES_VALUES.search(one.message)):
        return one.message
    wrong = wrong_values(one)
    if wrong and (not one.is_plain or isinstance(one.pairs[""][1], Tensor)):
        name, first = next(iter(wrong.items()))
        what = " ".join(filter(None, (one.message or one.what, f"`{name}`" if name else "")))
        return f"{what}: {first.text}" + (f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else "")
    return _plain(one) if one.is_plain else None


def _plain(one: Compared) -> str:
    """Return the message of a plain assertion, and what it expects: "expected at most 1, got 6"."""
    if not one.pairs:
        return f"{one.what} does not hold"
    where, got, expected = first_difference(*one.pairs[""])
    limit = LIMITS.get(one.operator, "" if one.operator in ("==", "is") else f"{one.operator} ")
    told = f"expected {limit}{shown(expected)}, got {shown(got)}{where}"
    return f"{one.message}: {told}" if one.message else f"{told}, in {one.what}"


def first_difference(got: Any, expected: Any) -> tuple[str, Any, Any]:
    """Return where two long lists or texts begin to differ, and what both have there."""
    if isinstance(got, str) and isinstance(expected, str):
        got, expected = ([side] if "\n" not in side else side.splitlines() for side in (got, expected))
    are_lists = isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected)
    if not are_lists or len(shown(expected)) < MAX_TEXT:
        return "", got, expected
    place = next((i for i, (g, e) in enumerate(zip(got, expected, strict=True)) if g != e), 0)
    return f" at place {place}", got[place], expected[place]
