"""Find and replace the tensors inside a module's inputs and outputs: in tuples, lists, dicts, dataclasses.

    for tensor in tensors_in(output):
        ...
    inputs = map_tensors(inputs, lambda x: x.to(torch.bfloat16))

Containers may be nested. Values that are no tensors stay unchanged. torch's pytree knows tuples, lists and
dicts; dataclasses are handled here, as in DDP.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, in the order of its elements and fields."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of `value` in which `change(tensor)` replaces each tensor."""

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not _is_dataclass(leaf):
            return leaf
        result = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                # The only way for a frozen dataclass, and it does not call a constructor again.
                object.__setattr__(result, field.name, map_tensors(getattr(leaf, field.name), change))
        return result

    return pytree.tree_map(map_leaf, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
