"""Describe which elements of a full tensor a rank has on any mesh, and find them among the saved parts.

      a weight of 4 x 6 elements      cut by tensor parallelism     and the box by ZeRO among 2 ranks
        0  1  2  3  4  5                3  4  5                       3  4  5         .  .  .
        6  7  8  9 10 11                9 10 11                       9 10 11         .  .  .
       12 13 14 15 16 17               15 16 17                       .  .  .        15 16 17
       18 19 20 21 22 23               21 22 23                       .  .  .        21 22 23
                                      box [0:4, 3:6]                elements 0:6    elements 6:12

The elements of a full tensor are numbered in row-major order, as on a line. A part of the tensor, on any
mesh, consists of runs: ranges of consecutive elements, such as 3..5 and 9..11 on the first ZeRO rank above.
To load on another mesh, a rank compares the runs that it wants with those that were saved.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lab.launch.errors import WorkbookError

Box = tuple[tuple[int, int], ...]  # for each dimension the first index, and the one after the last


@dataclass(frozen=True)
class Part:
    """Name elements of a full tensor: of its box, in row-major order, `numel` elements from `start` on.

    `box` is a range of indices in each dimension. Raise ValueError if there are no such elements.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    numel: int

    def __post_init__(self) -> None:
        fits = len(self.box) == len(self.shape) and all(
            0 <= first <= end <= size for (first, end), size in zip(self.box, self.shape, strict=True)
        )
        if not fits or self.start < 0 or self.numel < 0 or self.start + self.numel > math.prod(self._sizes):
            raise ValueError(f"{self} is no part of a tensor of shape {self.shape}")

    def __str__(self) -> str:
        box = ", ".join(f"{first}:{end}" for first, end in self.box)
        return f"{self.name} [{box}], elements {self.start}:{self.start + self.numel}"

    @property
    def _sizes(self) -> list[int]:
        return [end - first for first, end in self.box]

    def runs(self) -> list[tuple[int, int, int]]:
        """Return this part's runs: first element and end in the full tensor, first element in this part."""
        if self.numel == 0:
            return []
        # A run covers the last dimensions, as far as the box has them in full, and a range of the one before.
        inner = len(self.shape)
        while inner > 0 and self._sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        outer = max(inner - 1, 0)
        length = math.prod(self._sizes[outer:])
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first_of_box = sum(first * stride for (first, _), stride in zip(self.box, strides, strict=True))
        end = self.start + self.numel
        rows = np.arange(self.start // length, -(-end // length))
        in_full = np.full(len(rows), first_of_box)
        if outer:
            places = np.unravel_index(rows, self._sizes[:outer])
            in_full += sum(place * stride for place, stride in zip(places, strides, strict=False))
        begins, ends = np.maximum(rows * length, self.start), np.minimum((rows + 1) * length, end)
        starts = in_full + begins - rows * length
        columns = (starts, starts + ends - begins, begins - self.start)
        return list(zip(*(column.tolist() for column in columns), strict=True))


@dataclass(frozen=True, eq=False)
class Piece:
    """Hold a rank's part of the tensor `name`, whose full shape is `shape`.

    `box` is what this rank has of the full tensor by tensor parallelism (None: all of it). By ZeRO it may
    have only a range of the box: `start` is the first element of that range. `tensor` has the elements, in
    any shape. Several ranks may have the same part: all but one set `is_replica`, and do not save it.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    box: Box | None = None
    start: int = 0
    is_replica: bool = False

    @property
    def part(self) -> Part:
        """Return which elements these are."""
        shape = tuple(self.shape)
        box = tuple((0, size) for size in shape) if self.box is None else self.box
        return Part(self.name, shape, box, self.start, self.tensor.numel())


class Copy(NamedTuple):
    """Say that `numel` elements of saved part `source`, from `begin` on, go to `to` in the wanted part."""

    source: int
    begin: int
    to: int
    numel: int


class Line:
    """Hold, for every element of a full tensor, which of the saved parts has it.

    Raise WorkbookError if an element is in no part, or in two of them.
    """

    def __init__(self, name: str, shape: tuple[int, ...], parts: Iterable[Part]) -> None:
        parts = list(parts)
        self._runs = sorted((*run, source) for source, part in enumerate(parts) for run in part.runs())
        reached = 0
        for begin, end, _, source in self._runs:
            if begin > reached:
                raise _missing(name, reached, begin)
            if begin < reached:
                raise WorkbookError(
                    f"elements {begin} to {min(end, reached) - 1} of {name} are saved twice, also in "
                    f"{parts[source]}: the parts of all ranks must not overlap"
                )
            reached = end
        if reached < math.prod(shape):
            raise _missing(name, reached, math.prod(shape))
        self._starts = [run[0] for run in self._runs]

    def copies(self, wanted: Part) -> Iterator[Copy]:
        """Yield the copies that fill a wanted part, in its order."""
        for begin, end, to in wanted.runs():
            i = bisect_right(self._starts, begin) - 1
            while begin < end:
                first, last, place, source = self._runs[i]
                numel = min(end, last) - begin
                yield Copy(source, place + begin - first, to, numel)
                begin, to, i = begin + numel, to + numel, i + 1


def _missing(name: str, begin: int, end: int) -> WorkbookError:
    return WorkbookError(f"elements {begin} to {end - 1} of {name} are missing: no rank has saved them")
