"""Collect what a failed assertion has compared, so that a reader learns more than that it failed.

The frames of the error are searched from the inside. `lab.check.assert_same` and torch's `assert_close` have
their tensors as local variables. Of a plain `assert a == b` both sides are computed once more from the
frame's variables, but only where that calls nothing that could communicate or change a value.
"""

import ast
import functools
import linecache
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

MAX_NUMBERS = 1 << 16  # of one tensor; a larger one is not collected
MAX_TEXT = 200

_HARMLESS_CALLS = {
    *("len", "sum", "max", "min", "abs", "set", "sorted", "list", "tuple", "dict", "range", "round"),
    *("int", "float", "str", "bool", "zip", "enumerate", "isinstance", "type", "approx"),
    *("tensor", "zeros", "ones", "full", "arange", "cat", "stack", "zeros_like", "ones_like", "full_like"),
    *("item", "tolist", "numel", "dim", "size", "keys", "values", "items", "get", "count", "index", "abs"),
    *("mean", "double", "float", "is_set", "startswith", "equal", "allclose", "isfinite", "any", "all"),
}
_UNSAFE_NODES = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)
_COMPARING_CALLS = {"equal", "allclose"}


@dataclass(frozen=True)
class Compared:
    """Hold pairs (got, expected) by name, and what they are: "gradient of naive", or a plain expression.

    `world_size` is the number of ranks of the process that failed, or None without a group. `operator` is
    that of a plain assertion, which does not always say which side is expected, and `message` is its text.
    """

    what: str
    pairs: dict[str, tuple[Any, Any]]
    world_size: int | None
    operator: str = "=="
    is_plain: bool = False
    message: str = ""


def compared_in(error: BaseException) -> Compared | None:
    """Return what the failed assertion has compared, or None where that cannot be found."""
    if not isinstance(error, AssertionError):
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        with suppress(Exception):  # the error itself is what counts
            if (found := _in_call(frame)) is not None:
                return found
            if (found := _in_assertion(frame, line)) is not None:
                return replace(found, message=_message(frame, line, str(error)))
    return None


def _assertion(frame: FrameType, line: int) -> ast.Assert | None:
    asserted = (node for node in ast.walk(_tree(frame.f_code.co_filename)) if isinstance(node, ast.Assert))
    return next((node for node in asserted if node.lineno <= line <= (node.end_lineno or 0)), None)


def _message(frame: FrameType, line: int, text: str) -> str:
    """Return the message of the assertion on this line, in one line, without what pytest writes after it."""
    node = _assertion(frame, line)
    message = " ".join(text.partition("\nassert ")[0].split()) if node is not None and node.msg else ""
    return message if len(message) <= 2 * MAX_TEXT else message[: 2 * MAX_TEXT] + "..."


def _in_call(frame: FrameType) -> Compared | None:
    """Return what lab.check.assert_same or torch.testing.assert_close were called with."""
    names, code = frame.f_locals, frame.f_code
    if code.co_name == "assert_same" and code.co_filename.endswith("check.py"):
        keys = sorted(names["actual"].keys() | names["expected"].keys())
        pairs = {key: (names["actual"].get(key), names["expected"].get(key)) for key in keys}
        return _compared(names["what"], pairs)
    if code.co_name == "assert_close" and "torch" in code.co_filename:
        actual, expected = names["actual"], names["expected"]
        if isinstance(actual, dict) and isinstance(expected, dict):
            return _compared("", {str(key): (actual.get(key), expected.get(key)) for key in expected})
        if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
            return _compared("", {str(i): pair for i, pair in enumerate(zip(actual, expected, strict=False))})
        return _compared("", {_first_argument(frame.f_back, code.co_name): (actual, expected)})
    return None


def _first_argument(frame: FrameType | None, function: str) -> str:
    """Return the source of what a function was called with: "model.head.weight.grad"."""
    if frame is None:
        return ""
    calls = (node for node in ast.walk(_tree(frame.f_code.co_filename)) if isinstance(node, ast.Call))
    here = (call for call in calls if call.lineno <= frame.f_lineno <= (call.end_lineno or 0))
    return next((ast.unparse(call.args[0]) for call in here if _name(call.func) == function), "")


def _compared(what: str, pairs: dict[str, tuple[Any, Any]], **options: Any) -> Compared:
    size = dist.get_world_size() if dist.is_initialized() else None
    kept = {name: (_kept(got), _kept(expected)) for name, (got, expected) in pairs.items()}
    return Compared(what.strip().rstrip(","), kept, size, **options)


def _kept(value: Any) -> Any:
    """Return a copy that can be sent to another process: a tensor, a number or a text."""
    if isinstance(value, Tensor) and not isinstance(value, nn.parameter.UninitializedParameter):
        if value.numel() <= MAX_NUMBERS:
            return value.detach().to("cpu", copy=True)
        return f"a tensor of {value.numel()} elements"
    if type(value).__name__.startswith("Approx"):  # pytest.approx(value)
        value = value.expected
    if value is None or isinstance(value, bool | int | float | complex):
        return value
    if isinstance(value, str) and len(value) <= MAX_TEXT:
        return value
    if isinstance(value, list | tuple) and _is_simple(value):
        return [_kept(one) for one in value]
    text = repr(value)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def _is_simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(map(_is_simple, value))
    return isinstance(value, Tensor | int | float | str)


@functools.lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _in_assertion(frame: FrameType, line: int) -> Compared | None:
    """Return both sides of the comparison on this line, if it is a plain assertion that is false."""
    node = None if "site-packages" in frame.f_code.co_filename else _assertion(frame, line)
    if node is None:
        return None
    try:
        return _false_part(node.test, functools.partial(_value, frame))
    except ValueError:
        return _with_kept_left(node.test, frame)


def _false_part(test: ast.expr, value_of: Callable[[ast.expr], Any]) -> Compared | None:
    """Return both sides of the comparison that is false. Raise ValueError if it must not be repeated."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((found for part in test.values if (found := _false_part(part, value_of))), None)
    if isinstance(test, ast.Compare):
        left = test.left
        for operator, right in zip(test.ops, test.comparators, strict=True):
            part = ast.Compare(left, [operator], [right])
            if not value_of(part):
                return _sides(part, value_of(left), value_of(right))
            left = right
    elif isinstance(test, ast.Call) and _name(test.func) in _COMPARING_CALLS and len(test.args) >= 2:
        if not value_of(test):
            pair = value_of(test.args[0]), value_of(test.args[1])
            return _compared(ast.unparse(test), {"": pair}, is_plain=True)
    elif not value_of(test):
        return _compared(ast.unparse(test), {"": (value_of(test), True)}, operator="", is_plain=True)
    return None


def _with_kept_left(test: ast.expr, frame: FrameType) -> Compared | None:
    """Return both sides of a comparison whose left side pytest has kept, because it must not be repeated."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _sides(test, _value_kept_by_pytest(frame), _value(frame, test.comparators[0]))
    return None


def _sides(test: ast.Compare, left: Any, right: Any) -> Compared:
    before, after = ast.unparse(test.left), ast.unparse(test.comparators[0])
    operator = ast.unparse(test).removeprefix(before).removesuffix(after).strip()
    return _compared(ast.unparse(test), {"": (left, right)}, operator=operator, is_plain=True)


def _value(frame: FrameType, expression: ast.expr) -> Any:
    """Return the value of an expression in a frame. Raise ValueError if it might have an effect."""
    for node in ast.walk(expression):
        if isinstance(node, _UNSAFE_NODES):
            raise ValueError(f"{ast.unparse(node)} may have an effect.")
        if isinstance(node, ast.Call) and _name(node.func) not in _HARMLESS_CALLS:
            raise ValueError(f"{ast.unparse(node)} calls a function that may have an effect.")
    code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<assertion>", "eval")
    return eval(code, {**frame.f_globals, **frame.f_locals})


def _value_kept_by_pytest(frame: FrameType) -> Any:
    """Return the left side of a false comparison: pytest keeps values in variables @py_assert0, 1, 2, ..."""
    prefix = "@py_assert"
    found = frame.f_locals.items()
    kept = {int(name.removeprefix(prefix)): value for name, value in found if name.startswith(prefix)}
    result = min(number for number, value in kept.items() if value is False)
    return kept[max(number for number, value in kept.items() if number < result and value is not None)]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
