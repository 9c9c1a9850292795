"""Collect what a failed assertion has compared, so that a reader learns more than that it failed.

`lab.check.assert_same` and torch's `assert_close` have their tensors as local variables. Of a plain `assert
a == b` both sides are computed once more, but only where that calls nothing that could have an effect.
"""

import ast
import copy
import functools
import linecache
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType, FunctionType
from typing import Any

import torch.distributed as dist
from torch import Tensor

MAX_NUMBERS = 1 << 16  # of one tensor; a larger one is not collected
MAX_TEXT = 400

_HARMLESS_CALLS = {
    *("len", "sum", "max", "min", "abs", "set", "sorted", "list", "tuple", "dict", "range", "round"),
    *("int", "float", "str", "bool", "zip", "enumerate", "isinstance", "type", "approx"),
    *("tensor", "zeros", "ones", "full", "arange", "cat", "stack", "zeros_like", "ones_like", "full_like"),
    *("item", "tolist", "numel", "dim", "size", "keys", "values", "items", "get", "count", "index", "abs"),
    *("mean", "double", "float", "is_set", "startswith", "equal", "allclose", "isfinite", "any", "all"),
}


@dataclass(frozen=True)
class Compared:
    """Hold pairs (got, expected) by name, and what they are: "gradient of naive", or an expression."""

    what: str
    pairs: dict[str, tuple[Any, Any]]
    world_size: int | None  # None without a group
    operator: str = "=="  # of a plain assertion, which does not always say which side is expected
    is_plain: bool = False
    message: str = ""  # of a plain assertion


def compared_in(error: BaseException) -> Compared | None:
    """Return what the failed assertion has compared, or None where that cannot be found."""
    if str(error).startswith("DID NOT RAISE"):
        return _accepted(error)
    if not isinstance(error, AssertionError | TypeError):  # torch compares None with a TypeError
        return None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        with suppress(Exception):  # the error itself is what counts
            if (found := _in_call(frame)) is not None:
                return found
            node = None if "site-packages" in frame.f_code.co_filename else _assertion(frame, line)
            if node is not None and (found := _in_assertion(frame, node.test)) is not None:
                message = str(error).partition("\nassert ")[0]  # without what pytest writes after it
                return replace(found, message=_short(" ".join(message.split())) if node.msg else "")
    return None


def _accepted(error: BaseException) -> Compared | None:
    """Return, as a message, the call that should have raised an error, with the arguments of this case."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        for node in ast.walk(_tree(frame.f_code.co_filename)):
            if isinstance(node, ast.With) and node.lineno <= line <= (node.end_lineno or 0):
                raises = [one.context_expr for one in node.items if isinstance(one.context_expr, ast.Call)]
                kinds = [ast.unparse(one.args[0]) for one in raises if _name(one.func) == "raises"]
                if kinds:
                    call = ast.unparse(_WithValues(frame).visit(copy.deepcopy(node.body[-1])))
                    message = f"`{_short(call)}` must raise {kinds[0]}, and there was no error"
                    return _compared("", {"": (None, None)}, operator="", is_plain=True, message=message)
    return None


class _WithValues(ast.NodeTransformer):
    """Write numbers, texts and the names of functions in place of a frame's variables."""

    def __init__(self, frame: FrameType) -> None:
        self.values = frame.f_locals

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.values.get(node.id)
        if isinstance(value, int | float | str):
            return ast.Constant(value)
        return ast.Name(value.__name__) if isinstance(value, FunctionType) else node


def _assertion(frame: FrameType, line: int) -> ast.Assert | None:
    asserted = (node for node in ast.walk(_tree(frame.f_code.co_filename)) if isinstance(node, ast.Assert))
    return next((node for node in asserted if node.lineno <= line <= (node.end_lineno or 0)), None)


def _in_call(frame: FrameType) -> Compared | None:
    """Return what lab.check.assert_same or torch.testing.assert_close were called with."""
    names, code = frame.f_locals, frame.f_code
    if code.co_name == "assert_same" and code.co_filename.endswith("check.py"):
        keys = sorted(names["actual"].keys() | names["expected"].keys())
        pairs = {key: (names["actual"].get(key), names["expected"].get(key)) for key in keys}
        return _compared(names["what"], pairs)
    if code.co_name == "assert_close" and "torch" in code.co_filename:
        actual, expected = names["actual"], names["expected"]
        if isinstance(expected, list | tuple):
            actual, expected = dict(enumerate(actual)), dict(enumerate(expected))
        if isinstance(expected, dict):
            return _compared("", {str(key): (actual.get(key), one) for key, one in expected.items()})
        return _compared("", {_first_argument(frame.f_back): (actual, expected)})
    return None


def _first_argument(frame: FrameType | None) -> str:
    """Return the source of what assert_close was called with: "model.head.weight.grad"."""
    nodes = ast.walk(_tree(frame.f_code.co_filename)) if frame else ()
    calls = (node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "assert_close")
    here = (call for call in calls if frame and call.lineno <= frame.f_lineno <= (call.end_lineno or 0))
    return next((ast.unparse(call.args[0]) for call in here), "")


def _compared(what: str, pairs: dict[str, tuple[Any, Any]], **options: Any) -> Compared:
    size = dist.get_world_size() if dist.is_initialized() else None
    kept = {name: (_kept(got), _kept(expected)) for name, (got, expected) in pairs.items()}
    return Compared(what.strip().rstrip(","), kept, size, **options)


def _kept(value: Any) -> Any:
    """Return a copy that can be sent to another process: a tensor, a number, a text, or a list of them."""
    if isinstance(value, Tensor):
        is_small = value.numel() <= MAX_NUMBERS
        return value.detach().to("cpu", copy=True) if is_small else f"a tensor of {value.numel()} elements"
    if type(value).__name__.startswith("Approx"):  # pytest.approx(value)
        value = value.expected
    if value is None or isinstance(value, bool | int | float | complex):
        return value
    if isinstance(value, list | tuple) and _is_simple(value):
        return [_kept(one) for one in value]
    return _short(value if isinstance(value, str) else repr(value))


def _is_simple(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(map(_is_simple, value))
    return isinstance(value, Tensor | int | float | str)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


@functools.lru_cache(maxsize=8)
def _tree(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _in_assertion(frame: FrameType, test: ast.expr) -> Compared | None:
    """Return both sides of the comparison that is false in a plain assertion."""
    try:
        return _false_part(test, functools.partial(_value, frame))
    except ValueError:  # the left side must not be repeated, but pytest has kept it
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return _sides(test, _value_kept_by_pytest(frame), _value(frame, test.comparators[0]))
        return None


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
    elif isinstance(test, ast.Call) and _name(test.func) in ("equal", "allclose") and len(test.args) >= 2:
        pair = value_of(test.args[0]), value_of(test.args[1])
        if any(side is None for side in pair) or not value_of(test):
            return _compared(ast.unparse(test.args[0]), {"": pair}, is_plain=True)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if value := value_of(test.operand):
            return _compared(ast.unparse(test.operand), {"": (value, None)}, operator="not", is_plain=True)
    elif not value_of(test):
        return _compared(ast.unparse(test), {"": (value_of(test), True)}, operator="", is_plain=True)
    return None


def _sides(test: ast.Compare, left: Any, right: Any) -> Compared:
    before, after = ast.unparse(test.left), ast.unparse(test.comparators[0])
    operator = ast.unparse(test).removeprefix(before).removesuffix(after).strip()
    return _compared(before, {"": (left, right)}, operator=operator, is_plain=True)


def _value(frame: FrameType, expression: ast.expr) -> Any:
    """Return the value of an expression in a frame. Raise ValueError if it might have an effect."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and _name(node.func) not in _HARMLESS_CALLS:
            raise ValueError(f"{ast.unparse(node)} may have an effect.")
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
