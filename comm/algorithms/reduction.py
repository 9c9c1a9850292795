"""Compute reductions: combine the tensors of two ranks, and divide where a mean is wanted."""

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
    """Raise CommError for a reduction that does not exist or has no meaning for the dtype."""
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
    """Write a (op) b, elementwise, to `out`, which may be `a` or `b`."""
    _COMBINE[op](a, b, out=out)


def divisor_before(op: str, dtype: torch.dtype, ranks: int) -> int:
    """Return the number by which every rank divides its tensor before the first addition.

    It is 1, except for the mean of float16 tensors. The largest float16 is 65504, so a sum over ranks may
    overflow where the mean does not. (bfloat16 reaches as far as float32.) Division by a power of two avoids
    that without rounding. `divide_if_mean` divides by the rest.
    """
    return 1 << (ranks - 1).bit_length() if op == "mean" and dtype == torch.float16 else 1


def divide_if_mean(op: str, reduced: torch.Tensor, ranks: int) -> None:
    """Divide the combined tensors of all ranks by the number of ranks, in place, if `op` is "mean"."""
    if op == "mean":
        divided = divisor_before(op, reduced.dtype, ranks)
        if divided == 1:
            reduced.div_(ranks)
        elif divided != ranks:
            reduced.mul_(divided / ranks)
