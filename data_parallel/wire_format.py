"""Round gradients to 16 bits for the all-reduce: half the bytes of float32, and less exact gradients.

gradients     float32  ── / n, round ──►  bf16 or fp16 ── all-reduce (sum) ──►  bf16 or fp16 ──► float32
"""

import torch
import torch.distributed as dist
from torch import Tensor

from comm.collectives import Group, all_reduce

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class RoundedAllReduce:
    """An all-reduce of `flat` to the mean, rounded to `dtype` on the wire. The constructor starts it."""

    def __init__(self, flat: Tensor, dtype: torch.dtype, group: Group, pattern: str | None) -> None:
        self._numbers = real_numbers(flat)
        self._wire, op = to_wire(self._numbers, dtype, dist.get_world_size(group))
        self._work = all_reduce(self._wire, op=op, group=group, async_op=True, pattern=pattern)

    def wait(self) -> None:
        """Wait for the mean, and copy it into `flat`."""
        self._work.wait()
        self._numbers.copy_(self._wire)


def to_wire(numbers: Tensor, dtype: torch.dtype, ranks: int) -> tuple[Tensor, str]:
    """Return the tensor that travels, and the reduction that makes it the mean."""
    # Divide first: the sum over many ranks, or the gradient of one rank, may be too large for fp16.
    return (numbers / ranks).to(dtype), "sum"


def real_numbers(flat: Tensor) -> Tensor:
    """Return a view of `flat` in which a complex number is two real ones: rounding needs real numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def size_on_wire(flat: Tensor, dtype: torch.dtype | None) -> tuple[int, int]:
    """Return how many numbers travel for `flat`, and the bytes of each; `dtype` None rounds nothing."""
    return (flat.numel(), flat.itemsize) if dtype is None else (real_numbers(flat).numel(), dtype.itemsize)
