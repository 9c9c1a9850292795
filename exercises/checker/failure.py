"""Describe the error of a failed test: where it happened, what differs, and what has probably caused it."""

import ast
import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
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
LIMITS = {
    **{"==": "", "is": "", "<=": "at most ", "<": "less than ", ">=": "at least ", ">": "more than "},
    **{"!=": "anything but ", "is not": "anything but ", "in": "one of "},
}
PARTS = {"len": "the number of ", "max": "the largest of ", "min": "the smallest of ", "sum": "the sum of "}
_TRAFFIC = re.compile(r"Traffic\(bytes_sent=(\d+), messages_sent=(\d+)\)")
MAX_SHOWN = 120  # characters of a value
CLEAREST = ("factor", "zeros for none", "none for zeros", "extra", "missing", "zero", "overflow", "shape")


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
        "cause": None if table else likely_cause(evidence),  # the wrong cell says more
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
    if _NAMES_VALUES.search(one.message) or (not one.operator and len(one.message.split()) > 2):
        return one.message
    return ": ".join(filter(None, (one.message, _expectation(one))))


def _expectation(one: Compared) -> str:
    """Return what a plain assertion expects, and what there is instead."""
    got, expected = one.pairs[""]
    if one.operator in ("", "not"):
        return _truth(one, got)
    subject = in_words(one.what)
    if one.message and subject.startswith("the result of"):
        subject = ""
    if found := wrong_values(one).get("") if isinstance(expected, Tensor) else None:
        return f"{subject or 'the result'}: {found.text}{_example(got, expected)}"
    where, got, expected = first_difference(got, expected)
    subject = ", ".join(filter(None, (subject, where)))
    limit = LIMITS.get(one.operator, f"{one.operator} ")
    return f"{subject and subject + ': '}expected {limit}{_short(expected)}, got {_short(got)}"


def _truth(one: Compared, got: Any) -> str:
    """Return what a plain assertion says that compares nothing, but asks whether something is so."""
    is_wanted = one.operator != "not"
    if re.match(r"torch\.(equal|allclose)\(", one.what):
        return "two tensors should differ, and are equal"
    if one.what.endswith(".any()") and (side := in_words(one.what.removesuffix(".any()"))):
        return f"{side} should {'not ' * is_wanted}be zero everywhere"
    side = in_words(one.what) or f"`{_short(one.what)}`"
    if not isinstance(got, bool | str | Tensor):
        return f"{side} should be empty, and is {_short(got)}"
    return f"{side} should be {'true, and is false' if is_wanted else 'false, and is true'}"


def in_words(expression: str) -> str:
    """Return what an expression in a test stands for, or "" where only its code says it."""
    if "LEDGER." in expression:
        return "what the rank sends"
    if expression in ("got", "found"):
        return ""
    node = ast.parse(expression, mode="eval").body
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name, first = node.func.id, node.args[0] if node.args else None
        if name in ("sorted", "list", "set", *PARTS) and first is not None:
            inner = in_words(ast.unparse(first))
            return inner and PARTS.get(name, "") + inner
        if name == "run_ranks":
            return "what the ranks return"
        is_known = not any(isinstance(part, ast.Name) for one in node.args for part in ast.walk(one))
        return f"the result of `{_short(expression) if is_known else name}`"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "tolist":
        return in_words(ast.unparse(node.func.value))
    is_name = re.fullmatch(r"[\w.]+(\(\))?", expression)
    return f"`{expression}`" if is_name else ""


def first_difference(got: Any, expected: Any) -> tuple[str, Any, Any]:
    """Return where two long lists or texts begin to differ, and what both have there."""
    if isinstance(got, str) and isinstance(expected, str) and "\n" in expected:
        return first_difference(got.splitlines(), expected.splitlines())
    is_long = isinstance(got, list) and isinstance(expected, list) and len(str(expected)) > MAX_SHOWN
    if not is_long or len(got) != len(expected):
        return "", got, expected
    place = next((i for i, (g, e) in enumerate(zip(got, expected, strict=True)) if g != e), 0)
    return f"element {place}", got[place], expected[place]


def _example(got: Any, expected: Any) -> str:
    """Return the element that is most wrong: " (element [0, 1]: got 0.3, expected 0.1)"."""
    if isinstance(got, Tensor) and isinstance(expected, Tensor) and got.shape == expected.shape:
        if not got.numel():
            return ""
        if got.dtype == torch.bool:  # which cannot be subtracted
            got, expected = got.int(), expected.int()
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
    text = " ".join(_TRAFFIC.sub(r"\2 messages with \1 bytes", text).split())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
