"""Validate the inputs of tensor-parallel models."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lab.errors import WorkbookError


def the_tensor_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the one argument of a forward. WorkbookError unless there is one, and it is a tensor."""
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor):
        what = ", ".join("None" if one is None else f"a {type(one).__name__}" for one in given) or "nothing"
        raise WorkbookError(f"A tensor-parallel model takes one tensor, and was given {what}.")
    return given[0]
