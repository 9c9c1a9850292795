"""Say what has probably caused a failure from how numbers differ: by a factor, in a part, by rounding."""

from collections.abc import Iterable

import torch
from torch import Tensor

from exercises.evidence import Evidence


def norm(e: Evidence) -> str | None:
    one = e.wrong.get("norm")
    if one is None or not one.factor:
        return None
    if one.factor < 1:
        return (
            "The norm is too small: it is that of one rank's part. Add up the squares over all ranks before "
            "the root."
        )
    return "The norm is too large: what several ranks have a copy of is counted on each. Count it once."


def overflow(e: Evidence) -> str | None:
    if "overflow" in e.kinds and not _sum_fits(e):
        return (
            "The sum does not fit into this dtype, so it overflows to inf: divide before adding up, or add "
            "up in a wider dtype."
        )
    if "overflow" in e.kinds:
        return (
            "There is inf or nan, where a sum would fit into the dtype: is an exponential too large, or is "
            "something divided by zero? Before exp(), subtract the largest value of all ranks, and not that "
            "of one rank's part."
        )
    if "second" in e.kinds:
        return (
            "Every second number is zero, as where complex numbers are stored as pairs and the imaginary "
            "parts are lost: is a complex tensor converted to real numbers?"
        )
    if "real" in e.kinds:
        return "The imaginary parts are lost: is a complex tensor converted to real numbers?"
    return None


def _sum_fits(e: Evidence) -> bool:
    """Return whether as many such values as there are ranks would add up to a number of 16 bits."""
    expected = [pair[1] for one in e.compared.values() for pair in one.pairs.values()]
    tensors = [value for value in expected if isinstance(value, Tensor) and value.numel()]
    largest = max((value.abs().max().item() for value in tensors), default=0.0)
    is_small = all(value.element_size() > 2 for value in tensors)
    return bool(tensors) and is_small and largest * (e.ranks or 1) < torch.finfo(torch.float16).max


def scale(e: Evidence) -> str | None:
    factors = {round(one.factor, 4) for one in e.wrong.values()}
    if not e.kinds <= {"factor", "part factor"} or len(factors) != 1 or _counts_things(e):
        return None
    factor, n = factors.pop(), e.ranks or 0
    if n > 1 and _close(factor, n):
        return f"There are {n} ranks: {_as_often_as_ranks(e)}."
    if n > 1 and _close(factor, 1 / n):
        return (
            f"There are {n} ranks: it is divided by their number once too often, or one rank's part is taken "
            "for all."
        )
    if n > 1 and _close(factor, n * n):
        return f"That is {n} times {n}, with {n} ranks: it is added up over the ranks twice."
    if 1.5 < factor < 10 and _close(factor, round(factor)) and not n and e.first and e.first.is_plain:
        return (
            f"It is {round(factor)} times too large: is something counted too often, or is a division "
            "missing, such as that by the number of microbatches?"
        )
    if 1.5 < factor < 10 and _close(factor, round(factor)):
        return (
            f"It is added up {round(factor)} times where a mean is due, or once too often for each "
            "microbatch or part."
        )
    if 0 < factor < 0.7 and _close(1 / factor, round(1 / factor)):
        parts = round(1 / factor)
        return f"It is divided by {parts} once too often, or only one of {parts} parts is used."
    return "The sign is wrong." if _close(factor, -1) else None


def _as_often_as_ranks(e: Evidence) -> str:
    """Say what makes a value n times too large on n ranks: a gradient may also be that of the only user."""
    summed = "it is a sum over ranks that should be a mean"
    if e.first is None or not any("grad" in text for text in (e.first.what, *e.wrong)):
        return f"something that only one rank should add is added by each, {summed}, or it is added up twice"
    if e.across() == "agree":
        return f"{summed}, or it is added up twice"
    return (
        f"{summed}, or it is added up twice, or it is not averaged at all: then this is one rank's own "
        "value, and the other ranks have zeros or nothing"
    )


def zeros(e: Evidence) -> str | None:
    is_formula = e.first is not None and e.first.is_plain and e.first.world_size is None
    if "zero" in e.kinds and not is_formula:
        names = shown_names(name for name, one in e.wrong.items() if one.kind == "zero")
        where = "" if names == "``" else f" at {names}"
        return f"Only zeros arrive{where}: are they cleared too early, or never written or added?"
    return None


def powers(e: Evidence) -> str | None:
    if "factors" in e.kinds and not _counts_things(e):
        return "Parts have different factors: is each round or hop adding or dividing once more?"
    return None


def part(e: Evidence) -> str | None:
    if "part" not in e.kinds:
        return None
    name, one = next((name, one) for name, one in e.wrong.items() if one.kind == "part")
    where = f"`{name}` is " if name else "The result is "
    return f"{where}{one.text}: is one part left out, sent to the wrong rank or written to the wrong place?"


def rounded(e: Evidence) -> str | None:
    if e.kinds == {"rounded"}:
        return "It is right but for rounding: is something computed or sent in a smaller dtype?"
    return None


def _counts_things(e: Evidence) -> bool:
    """Return whether a plain assertion compares integers, which are not sums over ranks."""
    if not e.first or not e.first.is_plain:
        return False
    values = [v for side in e.first.pairs[""] for v in (side if isinstance(side, list) else [side])]
    return all(isinstance(value, int) for value in values)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * abs(b)


def shown_names(names: Iterable[str]) -> str:
    first, *others = (f"`{name}`" for name in names)
    return f"{first} and {len(others)} more" if others else first
