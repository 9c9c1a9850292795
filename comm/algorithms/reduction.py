"""The arithmetic of reductions: how two contributions become one, and what is done once at the end."""

import functools
from collections.abc import Callable

import torch

from comm.errors import CommError

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raises CommError for a reduction that does not exist or has no meaning for the dtype."""
    if op not in _COMBINE:
        raise CommError(f"There is no reduction {op!r}; choose one of {', '.join(_COMBINE)}.")
    if not _exists(op, dtype):
        raise CommError(f"torch has no {op} of {dtype} tensors; send them as another dtype.")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise CommError(f"The mean of {dtype} tensors would be rounded: use op='sum' and divide as you need.")


@functools.cache
def _exists(op: str, dtype: torch.dtype) -> bool:
    try:
        _COMBINE[op](torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def combine(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a (op) b, elementwise; `out` may be `a` or `b`."""
    _COMBINE[op](a, b, out=out)


def divisor_before(op: str, dtype: torch.dtype, ranks: int) -> int:
    """Return what every rank divides its contribution by before the first is added: more than 1 for float16.

    The largest float16 is 65504 (bfloat16's is float32's), and a sum over ranks may be larger where the
    mean is not. A power of two makes room for the sum without rounding; `divide_if_mean` divides by the rest.
    """
    return 1 << (ranks - 1).bit_length() if op == "mean" and dtype == torch.float16 else 1


def divide_if_mean(op: str, reduced: torch.Tensor, ranks: int) -> None:
    """What is left to do, in place, once all ranks' contributions are combined: a mean divides, once."""
    if op == "mean":
        divided = divisor_before(op, reduced.dtype, ranks)
        if divided == 1:
            reduced.div_(ranks)
        elif divided != ranks:
            reduced.mul_(divided / ranks)
