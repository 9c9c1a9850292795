"""Describe the error of a failed test: where it happened, what differs, and what has probably caused it."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from exercises.checker.causes import Evidence, likely_cause
from exercises.checker.compared import Compared, compared_in
from exercises.checker.explain import name_of
from exercises.checker.relations import Relation, wrong_values
from lab import ranks
from lab.ranks import RankError
from lab.ranks.waiting import drawn

_NAMES_VALUES = re.compile(r"\b(not|expected|got|instead of)\b")
ranks.describe = compared_in  # a rank that fails says what it has compared
LIMITS = {"==": "", "<=": "at most ", "<": "less than ", ">=": "at least ", ">": "more than "}
_TRAFFIC = re.compile(r"Traffic\(bytes_sent=(\d+), messages_sent=(\d+)\)")
CLEAREST = ("factor", "zeros for none", "extra", "missing", "zero", "overflow", "shape")


def failure_of(error: BaseException, test: str = "", table: str | None = None) -> dict[str, Any]:
    """Return what grade.py needs to know about an error: where it happened, what differs, what may cause it.

    `test` is the failed test's id, and `table` the learner's wrong schedule, which begins with a sentence.
    """
    own = compared_in(error)
    compared = error.described if isinstance(error, RankError) else {None: own} if own else {}
    waits = error.waits if isinstance(error, RankError) else {}
    rank = error.rank if isinstance(error, RankError) else None
    evidence = Evidence(name_of(test), str(error), compared, waits)
    difference, drawing = shown_difference(compared, rank), ""
    if found := evidence.who_waits():
        drawing = drawn(found)
    if table:
        difference, _, drawing = table.partition("\n")
    return {
        "type": type(error).__name__,
        "rank": rank,
        "text": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "difference": difference,
        "cause": likely_cause(evidence),
        "drawing": drawing,
    }


def shown_difference(compared: Mapping[int | None, Compared], rank: int | None) -> str | None:
    """Return what one rank has compared: "gradient `weight` is 3 times what it should be: got ...".

    The value with the clearest relation is shown, and of the others the number. None says that nothing is
    known of what was compared.
    """
    one = compared.get(rank) or next(iter(compared.values()), None)
    if one is None:
        return None
    if one.is_plain:
        return _plain(one)
    wrong = wrong_values(one)
    if not wrong:
        return None
    name = min(wrong, key=lambda name: _clarity(wrong[name]))
    also = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    what = " ".join(filter(None, (one.what, f"`{name}`" if name else "")))
    text = f"{what or 'the result'}: {wrong[name].text}"
    return f"{text}{_example(*one.pairs[name])}{also}"


def _plain(one: Compared) -> str | None:
    """Return what a plain assertion expects, and its message: a sentence, or the name of a case."""
    is_sentence = one.message[:1].isalpha() and len(one.message.split()) > 2
    if not is_sentence:
        return f"{one.message}: {_expectation(one)}" if one.message else _expectation(one)
    is_complete = not one.operator or _NAMES_VALUES.search(one.message)
    return one.message if is_complete else f"{one.message}{_pair(*one.pairs[''])}"


def _expectation(one: Compared) -> str:
    """Return what a plain assertion expects, and what there is instead."""
    got, expected = one.pairs[""]
    what = f"the test expects `{_short(one.what)}`"
    if not one.operator:
        return f"{what}, and it is {_short(got)}"
    if isinstance(got, Tensor) or isinstance(expected, Tensor):
        found = wrong_values(one).get("")
        return f"{what}, and it is not so{': ' + found.text if found else ''}"
    left = one.what.partition(f" {one.operator} ")[0]
    side = "what the ranks return" if left.startswith("run_ranks(") else f"`{_short(left)}`"
    if expected is None and one.operator == "is not":
        return f"{side} is None"
    if one.operator not in LIMITS:
        return f"{what}, but the left side is {_short(got)} and the right side {_short(expected)}"
    return f"{side} is {_short(got)}, and the test expects {LIMITS[one.operator]}{_short(expected)}"


def _example(got: Any, expected: Any) -> str:
    """Return the element that is most wrong: " (element [0, 1]: got 0.3, expected 0.1)"."""
    if isinstance(got, Tensor) and isinstance(expected, Tensor) and got.shape == expected.shape:
        if not got.numel():
            return ""
        place = int((got - expected).abs().nan_to_num(nan=float("inf")).argmax())
        index = [int(i) for i in _unravelled(place, got.shape)]
        one, other = got.flatten()[place].item(), expected.flatten()[place].item()
        where = f"element {index}: " if index else ""
        return f" ({where}got {_short(one)}, expected {_short(other)})"
    return "" if isinstance(got, Tensor) or isinstance(expected, Tensor) else _pair(got, expected)


def _pair(got: Any, expected: Any) -> str:
    return "" if got is None or expected is None else f" (got {_short(got)}, expected {_short(expected)})"


def _unravelled(place: int, shape: tuple[int, ...]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.insert(0, rest)
    return index


def _clarity(found: Relation) -> int:
    return CLEAREST.index(found.kind) if found.kind in CLEAREST else len(CLEAREST)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float | complex) else str(value) or "empty"
    text = _TRAFFIC.sub(r"\2 messages with \1 bytes", text)
    return text if len(text) <= 120 else text[:117] + "..."
