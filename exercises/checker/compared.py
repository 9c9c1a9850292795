"""Collect what a failed assertion has compared, and what another error says, for a reader.

`lab.check.assert_same` and torch's `assert_close` have their tensors as local variables. Both sides of a
plain `assert a == b` are known where watched.py has been imported.
"""

import linecache
import re
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

MAX_NUMBERS = 1 << 16  # of one tensor; a larger one is not collected
MAX_TEXT = 120  # characters of a value or of a line of code
DATACLASS = re.compile(r"\b[A-Z]\w*\((\w+=[^()]*)\)")  # as Python writes one

_last: tuple[str, Any, Any] | None = None  # the operator and both sides of the last comparison that was false


@dataclass(frozen=True)
class Compared:
    """Hold pairs (got, expected) by name, and what they are: "gradient of naive", or a test's line of code.

    A plain assertion has one pair with the name "", and its operator; or none if it compares nothing. An
    error that is no failed assertion has no pair, and its text is the message.
    """

    what: str
    pairs: dict[str, tuple[Any, Any]]
    world_size: int | None = None  # None without a group
    is_plain: bool = False
    operator: str = "=="
    message: str = ""  # of a plain assertion, or of another error


def remember(operator: str, got: Any, expected: Any) -> None:
    """Keep both sides of a comparison that is false, for the case that it is an assertion's."""
    global _last
    _last = operator, got, expected


def compared_in(error: BaseException) -> Compared:
    """Return what the failed assertion has compared or, of another error, its class, text and code."""
    global _last
    size = dist.get_world_size() if dist.is_initialized() else None
    code = ""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    for frame, place in zip(frames, traceback.extract_tb(error.__traceback__), strict=True):
        if (found := _named_tensors(frame)) is not None:
            what, pairs = found
            return Compared(what or code, _kept_pairs(pairs), size)
        if "site-packages" not in place.filename:
            code = _source(place)
    if not isinstance(error, AssertionError):
        return Compared(code, {}, size, message=_named(error) + (f", in {code}" if code else ""))
    (operator, *sides), _last = _last or ("",), None
    message = "" if str(error).startswith("assert ") else str(error).partition("\nassert ")[0]
    pairs = _kept_pairs({"": (sides[0], sides[1])} if sides else {})
    return Compared(code, pairs, size, True, operator, " ".join(message.split()))


def _named(error: BaseException) -> str:
    """Return an error's class and the first lines of its text."""
    text = "; ".join([line.strip() for line in str(error).splitlines() if line.strip()][:4])
    if text.startswith("DID NOT RAISE"):  # pytest.raises
        return "there was no error"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _named_tensors(frame: FrameType) -> tuple[str, dict[str, tuple[Any, Any]]] | None:
    """Return the name and the pairs of a call of lab.check.assert_same or torch.testing.assert_close."""
    names, code = frame.f_locals, frame.f_code
    if code.co_name == "assert_same" and code.co_filename.endswith("check.py"):
        keys = sorted(names["actual"].keys() | names["expected"].keys())
        return names["what"], {key: (names["actual"].get(key), names["expected"].get(key)) for key in keys}
    if code.co_name != "assert_close" or "torch" not in code.co_filename:
        return None
    actual, expected = names["actual"], names["expected"]
    if isinstance(expected, list | tuple):
        actual, expected = dict(enumerate(actual)), dict(enumerate(expected))
    if not isinstance(expected, dict):
        return "", {"": (actual, expected)}
    return "", {str(key): (actual.get(key), one) for key, one in expected.items()}


def _source(place: traceback.FrameSummary) -> str:
    """Return the code at a place of a traceback in one line, in backticks."""
    first = place.lineno or 1
    lines = linecache.getlines(place.filename)[first - 1 : place.end_lineno or first]
    return f"`{shown(' '.join(' '.join(lines).split()).removeprefix('torch.testing.'))}`"


def _kept_pairs(pairs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: (_kept(got), _kept(expected)) for name, (got, expected) in pairs.items()}


def _kept(value: Any) -> Any:
    """Return a copy that can be sent to another process: a tensor, numbers, or a text for anything else."""
    if isinstance(value, Tensor):
        is_small = value.numel() <= MAX_NUMBERS
        return value.detach().to("cpu", copy=True) if is_small else f"a tensor of {value.numel()} elements"
    if type(value).__name__.startswith("Approx"):  # pytest.approx(value)
        value = value.expected
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    return [_kept(one) for one in value] if isinstance(value, list | tuple) else shown(value)


def shown(value: Any) -> str:
    """Return a value for a reader: short, and of a dataclass the fields alone."""
    if isinstance(value, float | complex):
        return f"{value:.6g}"
    text = f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else str(value)
    text = DATACLASS.sub(r"\1", " ".join(text.split())) or "empty"
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
