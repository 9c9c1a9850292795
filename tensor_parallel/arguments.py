"""Validate what tensor-parallel scripts and models are given."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig


def the_tensor_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the one argument of a forward. WorkbookError unless there is one, and it is a tensor."""
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor):
        what = ", ".join("None" if one is None else f"a {type(one).__name__}" for one in given) or "nothing"
        raise WorkbookError(f"A tensor-parallel model takes one tensor, and was given {what}.")
    return given[0]


def validate_size(size: str, ranks: int) -> None:
    """Raise WorkbookError unless the ranks can have equally many heads of the GPT that --size names."""
    heads = GPTConfig.named(size).num_heads
    if heads % ranks:
        cure = (
            "start 2, 3, 4, 6, 8, 12 or 24 ranks"
            if size == "24heads"
            else "take --size 24heads on 2, 3, 4, 6 or 8 ranks"
        )
        raise WorkbookError(
            f"--size {size}: its {heads} heads cannot be divided among {ranks} ranks equally; {cure}."
        )
