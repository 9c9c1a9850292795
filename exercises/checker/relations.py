"""Find how what a test got is related to what it expected: 2 times as large, in another order, and so on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exercises.checker.compared import Compared

CLOSE = 1e-6
DIGITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}  # the rounding error of a number


@dataclass(frozen=True)
class Relation:
    """One value that is wrong. `kind` is a word for causes.py, and `text` the same for a reader."""

    kind: str
    text: str
    factor: float = 0.0


def relation(got: Any, expected: Any) -> Relation | None:
    """Return how two values are related, or None if they agree or cannot be compared."""
    if got is None or expected is None:
        return _with_none(got, expected)
    g, e = _as_tensor(got), _as_tensor(expected)
    if g is None or e is None:
        return None
    if g.shape != e.shape:
        return Relation("shape", f"shape {tuple(g.shape)} instead of {tuple(e.shape)}")
    scale = _largest(e)
    if _agree(g, e, 1e-9 * scale):
        return None
    if not torch.isfinite(g).all() and torch.isfinite(e).all():
        return Relation("overflow", "inf or nan")
    if scale and not g.any():
        return Relation("zero", "there are only zeros", 0.0)
    factor = (g * e.conj()).sum().real.item() / max((e * e.conj()).sum().real.item(), 1e-300)
    is_shared = g.numel() > 1 or not g.shape  # of the one element of a tensor any factor holds
    if (
        is_shared
        and abs(factor) > 1e-3
        and abs(factor - 1) > 1e-3
        and _agree(g, factor * e, CLOSE * abs(factor) * scale)
    ):
        return Relation("factor", f"{factor:.6g} times what it should be", factor)
    return _by_element(g, e, scale)


def wrong_values(compared: Compared) -> dict[str, Relation]:
    """Return the relation of each value that is wrong, by name."""
    found = {name: relation(got, expected) for name, (got, expected) in compared.pairs.items()}
    wrong = {name: one for name, one in found.items() if one is not None}
    if not compared.what.startswith("initial"):
        return wrong
    own = Relation("initial", "it is not the first rank's value")
    return {name: one if one.kind in ("missing", "extra", "shape") else own for name, one in wrong.items()}


def wrong_elements(got: Tensor, expected: Tensor) -> list[bool]:
    """Return for each element, in the order of `flatten`, whether it differs from the expected one."""
    g, e = (tensor.detach().flatten().to(torch.complex128) for tensor in (got, expected))
    return (~((g - e).abs() <= (1e-9 * e.abs()).clamp(min=1e-15))).tolist()


def belongs_to(compared: Compared) -> dict[str, str]:
    """Return, for each wrong tensor that has what another one should have, the name of that other one."""
    tensors = {
        name: (_as_tensor(got), _as_tensor(expected))
        for name, (got, expected) in compared.pairs.items()
        if _is_tensor(got) and _is_tensor(expected)
    }
    filled = {name: expected for name, (_, expected) in tensors.items() if expected.any()}
    wrong = wrong_values(compared).keys() & tensors.keys()
    return {
        name: other
        for name in tensors
        if name in wrong
        for other, expected in filled.items()
        if other != name and tensors[name][0].shape == expected.shape
        if _agree(tensors[name][0], expected, 1e-9 * _largest(expected))
    }


def across_ranks(compared: Mapping[int | None, Compared], name: str) -> str | None:
    """Return how the ranks' values of one name are related: "mean", "sum", "groups", "agree" or "differ".

    "mean" says that the ranks have values of their own, the mean of which is right; "sum" that their sum is.
    "groups" says that some ranks agree with one another, and not with others.
    """
    found = [
        _tensors(one, name)
        for _, one in sorted(compared.items(), key=lambda one: str(one[0]))
        if name in one.pairs
    ]
    if len(found) < 2 or None in found:
        return None
    gots, expecteds = zip(*found, strict=True)
    first, scale = expecteds[0], _largest(expecteds[0])
    if not all(e.shape == first.shape and _agree(e, first, CLOSE * scale) for e in expecteds):
        return None
    different: list[Tensor] = []
    for got in gots:
        if not any(_agree(got, other, CLOSE * scale) for other in different):
            different.append(got)
    size = next(iter(compared.values())).world_size or len(gots)
    if len(different) == 1:
        return "agree" if len(gots) == size else None
    if len(gots) == size >= 4 and len(different) <= size // 2:
        return "groups"
    missing = size - len(gots)  # a rank that did not fail has the right value
    total = torch.stack(gots).sum(0) + missing * first
    if _agree(total / size, first, CLOSE * scale):
        return "mean"
    return "sum" if not missing and _agree(total, first, CLOSE * scale) else "differ"


def _tensors(one: Compared, name: str) -> tuple[Tensor, Tensor] | None:
    got, expected = (_as_tensor(value) for value in one.pairs[name])
    if got is None or expected is None or got.shape != expected.shape:
        return None
    return got, expected


def _with_none(got: Any, expected: Any) -> Relation | None:
    if got is expected:
        return None
    if got is None:
        if _is_zero(expected):
            return Relation("none for zeros", "it is None, and must be zeros")
        return Relation("missing", "it is None, and a tensor is expected")
    if _is_zero(got):
        return Relation("zeros for none", "there are zeros, and None is expected")
    return Relation("extra", "there is a tensor, and None is expected")


def _is_zero(value: Any) -> bool:
    return (tensor := _as_tensor(value)) is not None and not tensor.any()


def _by_element(g: Tensor, e: Tensor, scale: float) -> Relation:
    """Return the relation where no single factor holds for all elements."""
    error = (g - e).abs()
    worst = error.max().item()
    is_far = worst > CLOSE * scale  # else each number is almost right at its own place
    if is_far and _agree(g.flatten().abs().sort()[0], e.flatten().abs().sort()[0], CLOSE * scale):
        return Relation("order", "the right numbers in another order")
    if g.numel() > 3 and any(worst <= digits * scale for digits in DIGITS.values()):
        return Relation("rounded", f"off by {worst:.3g}, as if it were rounded")
    wrong = (error > 1e-9 * scale).flatten()
    if not wrong.all():
        places = wrong.nonzero().flatten().tolist()
        where = f"wrong in {len(places)} of {g.numel()} elements ({_listed(places)})"
        inner = relation(g.flatten()[wrong], e.flatten()[wrong])
        if inner is not None and inner.kind == "factor":
            return Relation("part factor", f"{where}, {inner.text}", inner.factor)
        return Relation("part", where)
    ratios = (g / e).real.flatten().round(decimals=6).unique().tolist()
    if (e != 0).all() and len(ratios) <= 8 and all(_is_simple(ratio) for ratio in ratios):
        shown = ", ".join(f"{ratio:.4g}" for ratio in ratios)
        return Relation("factors", f"{shown} times what it should be, by element")
    return Relation("other", f"off by {worst:.3g}, where the largest element is {scale:.3g}")


def _listed(places: list[int]) -> str:
    return ", ".join(map(str, places)) if len(places) <= 4 else f"{places[0]} to {places[-1]}"


def _is_simple(ratio: float) -> bool:
    """Return whether a ratio is an integer or one divided by an integer."""
    inverse = 1 / ratio if ratio else 0.0
    return abs(ratio - round(ratio)) < 1e-4 or abs(inverse - round(inverse)) < 1e-4


def _agree(g: Tensor, e: Tensor, tolerance: float) -> bool:
    return bool(((g - e).abs() <= max(tolerance, 1e-15)).all())


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _as_tensor(value: Any) -> Tensor | None:
    """Return a number, a list of numbers or a tensor in double precision, or None for anything else."""
    if isinstance(value, bool | str):
        return None
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
