"""Find how what a test got is related to what it expected: 2 times as large, in another order, and so on."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exercises.checker.compared import Compared, shown

CLOSE = 1e-6
CLEAREST = ("factor", "none", "zero", "infinite", "shape", "order", "block", "other")


@dataclass(frozen=True)
class Relation:
    """One value that is wrong. `kind` is one of CLEAREST, and `text` says the same to a reader."""

    kind: str
    text: str
    factor: float = 0.0


def wrong_values(compared: Compared) -> dict[str, Relation]:
    """Return the relation of each value that is wrong, by name, and the clearest one first."""
    found = {name: relation(got, expected) for name, (got, expected) in compared.pairs.items()}
    wrong = [(name, one) for name, one in found.items() if one is not None]
    return dict(sorted(wrong, key=lambda item: CLEAREST.index(item[1].kind)))


def relation(got: Any, expected: Any) -> Relation | None:
    """Return how two values are related, or None if they agree or are no tensors and no real numbers."""
    g, e = _as_tensor(got), _as_tensor(expected)
    if got is None and e is not None:
        return Relation("none", f"it is None, and {'a tensor is' if e.any() else 'zeros are'} expected")
    if expected is None and g is not None:
        return Relation("none", "there is a tensor, and None is expected")
    if g is None or e is None:
        return None
    if g.shape != e.shape:
        return Relation("shape", f"shape {tuple(g.shape)} instead of {tuple(e.shape)}")
    scale = e.abs().max().item() if e.numel() else 0.0
    if _agree(g, e, 1e-9 * scale):
        return None
    return _of_numbers(g, e, scale, _example(g, e))


def _of_numbers(g: Tensor, e: Tensor, scale: float, example: str) -> Relation:
    if not torch.isfinite(g).all() and torch.isfinite(e).all():
        return Relation("infinite", f"inf or nan {example}")
    if scale and not g.any():
        return Relation("zero", f"there are only zeros {example}")
    factor = (g * e.conj()).sum().real.item() / max((e * e.conj()).sum().real.item(), 1e-300)
    has_one = g.numel() > 1 or not g.shape  # of the one element of a tensor any factor holds
    if has_one and abs(factor) > 1e-3 and _agree(g, factor * e, CLOSE * abs(factor) * scale):
        return Relation("factor", f"{factor:.6g} times what it should be {example}", factor)
    error = (g - e).abs()
    is_far = error.max().item() > CLOSE * scale  # else each number is almost right at its own place
    can_be_sorted = g.numel() > 2 and not g.is_complex() and not e.is_complex()
    if is_far and can_be_sorted and _agree(g.flatten().sort()[0], e.flatten().sort()[0], CLOSE * scale):
        return Relation("order", f"the right numbers in another order {example}")
    places = (error > 1e-9 * scale).flatten().nonzero().flatten().tolist()
    first, last = places[0], places[-1]
    if 1 < last - first + 1 == len(places) < g.numel():
        end = "on" if last == g.numel() - 1 else f"to element {last}"
        return Relation("block", f"wrong from element {first} {end}, and right elsewhere {example}")
    if len(places) < g.numel():
        return Relation("other", f"wrong in {len(places)} of {g.numel()} elements {example}")
    return Relation("other", f"off by {error.max().item():.3g}, where the largest is {scale:.3g} {example}")


def across_ranks(compared: Mapping[int | None, Compared], name: str) -> str | None:
    """Return "mean" or "sum" if that of the ranks' values of one name would be right, else None.

    All of them must be different. A rank of the group that has not failed has the right value.
    """
    pairs = [one.pairs.get(name, (None, None)) for one in compared.values()]
    found = [tensor for pair in pairs for value in pair if (tensor := _as_tensor(value)) is not None]
    if len(pairs) < 2 or len(found) != 2 * len(pairs) or len({tensor.shape for tensor in found}) > 1:
        return None
    gots, expecteds = torch.stack(found[::2]), torch.stack(found[1::2])
    right = expecteds[0]
    tolerance = CLOSE * right.abs().max().item() if right.numel() else 0.0
    are_different = all(not _agree(a, b, tolerance) for a, b in itertools.combinations(gots, 2))
    if not are_different or not _agree(expecteds, right, tolerance):
        return None
    size = next(iter(compared.values())).world_size or len(pairs)
    total = gots.sum(0) + (size - len(pairs)) * right
    if _agree(total / size, right, tolerance):
        return "mean"
    return "sum" if len(pairs) == size and _agree(total, right, tolerance) else None


def _example(g: Tensor, e: Tensor) -> str:
    """Return the element that is most wrong: "(element [0, 1]: got 0.3, expected 0.1)"."""
    worst = (g - e).abs().nan_to_num(nan=float("inf")).argmax()
    index = [int(i) for i in torch.unravel_index(worst, g.shape)] if g.shape else []
    got, expected = g.flatten()[worst].item(), e.flatten()[worst].item()
    return f"({f'element {index}: ' if index else ''}got {shown(got)}, expected {shown(expected)})"


def _agree(g: Tensor, e: Tensor, tolerance: float) -> bool:
    return bool(((g - e).abs() <= max(tolerance, 1e-15)).all())


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, a real number or a list of them in double precision, or None for anything else."""
    if isinstance(value, bool | int | str):  # an integer counts things
        return None
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
