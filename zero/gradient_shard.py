"""Hold the gradients of a unit of stage 3: in full until they are sent, then the shard of their mean.

backward      gradient ─► [ full buffer ] ── reduce-scatter, mean ───► [shard]; the buffer is freed
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from data_parallel.flat import Flat


class GradientShard:
    """The gradients of the parameters of `flat`: `full` in `wire_dtype`, and this rank's `shard` in `dtype`.

    The gradients of several backwards add up in the shard until `clear` is called.
    """

    def __init__(self, flat: Flat, dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
        self.flat = flat
        self._dtype, self._wire_dtype = dtype, wire_dtype
        self.shard: Tensor | None = None
        self.full: Tensor | None = None
        self._views: list[Tensor] = []
        self._missing: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Return the size of the full gradients in bytes."""
        return self.flat.numel * self._wire_dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Return whether all gradients are there, so that they can be reduced."""
        return self.full is not None and not self._missing

    def put(self, position: int, gradient: Tensor) -> None:
        """Copy a gradient into `full`. `position` is the index of its parameter in `flat.parameters`."""
        if self.full is None:
            self._allocate(gradient.device)
        self._missing.remove(position)
        self._views[position].copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def fill_up(self, device: torch.device) -> None:
        """Put zeros in the place of gradients that are missing."""
        if self.full is None:
            self._allocate(device)
        for position in self._missing:
            self._views[position].zero_()
        self._missing = set()

    def _allocate(self, device: torch.device) -> None:
        self.full = torch.empty(self.flat.numel, dtype=self._wire_dtype, device=device)
        self.full[self.flat.numel - self.flat.padding :].zero_()
        self._views = self.flat.views(self.full)
        self._missing = set(range(len(self._views)))

    def keep(self, arrived: Tensor) -> None:
        """Add the shard that has arrived to those of earlier backwards; free the full gradients."""
        self.full, self._views = None, []
        if self.shard is None:
            self.shard = arrived.to(self._dtype)
        else:
            self.shard += arrived

    def clear(self) -> None:
        """Drop the gradients that have added up."""
        self.shard = None


class Reduces(Protocol):
    """An object that holds gradients and can reduce them: a unit."""

    gradients: GradientShard

    def reduce_scatter(self) -> None: ...

    def wait_for_gradients(self) -> None: ...


class InFlightReductions:
    """The reductions that are in flight: together their full gradients take at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._started: deque[Reduces] = deque()

    def start(self, unit: Reduces) -> None:
        """Start to reduce a unit's gradients, after waiting for older ones that take too much memory."""
        while (
            self._started
            and sum(one.gradients.num_bytes for one in (unit, *self._started)) > self._most_bytes
        ):
            self._started.popleft().wait_for_gradients()
        unit.reduce_scatter()
        self._started.append(unit)

    def finish(self) -> None:
        """Wait for all reductions in flight."""
        while self._started:
            self._started.popleft().wait_for_gradients()
