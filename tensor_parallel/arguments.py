"""What tensor parallel models take, and gradients of all kinds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.errors import WorkbookError


def the_tensor_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the one argument of a forward. WorkbookError unless there is one, and it is a tensor."""
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor):
        what = ", ".join("None" if one is None else f"a {type(one).__name__}" for one in given) or "nothing"
        raise WorkbookError(f"A tensor-parallel model takes one tensor, and was given {what}.")
    return given[0]


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squared magnitudes, in float64, also of a sparse or a complex gradient."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.double().square().sum()
