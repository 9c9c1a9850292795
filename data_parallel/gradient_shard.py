"""A rank's shard of the gradients of a unit; the full gradients live only until they have been sent.

backward      gradient ─► [ full buffer ] ── reduce-scatter, mean ───► [shard]; the buffer is given back
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from data_parallel.flat import Flat


class GradientShard:
    """Gradients of the parameters of `flat`: first `full`, of `wire_dtype`, then their `shard`, of `dtype`.

    Several backwards add up in the shard, until `clear`.
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
        """Return the bytes of the full gradients, while they are here."""
        return self.flat.numel * self._wire_dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Return whether all gradients are here, and can be reduced."""
        return self.full is not None and not self._missing

    def put(self, position: int, gradient: Tensor) -> None:
        """Take the gradient of the parameter at that position of the flat; the caller need not keep it."""
        if self.full is None:
            self._allocate(gradient.device)
        self._missing.remove(position)
        self._views[position].copy_(gradient.to_dense() if gradient.is_sparse else gradient)

    def fill_up(self, device: torch.device) -> None:
        """Count gradients that this rank does not have as zero."""
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
        """Add the shard that has arrived to those of earlier backwards; give the full gradients back."""
        self.full, self._views = None, []
        if self.shard is None:
            self.shard = arrived.to(self._dtype)
        else:
            self.shard += arrived

    def clear(self) -> None:
        """Forget what has added up."""
        self.shard = None


class Reduces(Protocol):
    """Has gradients, and can reduce them."""

    gradients: GradientShard

    def reduce_scatter(self) -> None: ...

    def wait_for_gradients(self) -> None: ...


class InFlightReductions:
    """Reductions that have started, few enough that full gradients take at most `most_bytes` together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._started: deque[Reduces] = deque()

    def start(self, unit: Reduces) -> None:
        """Reduce the unit's gradients; first wait for the oldest where there are too many."""
        while (
            self._started
            and sum(one.gradients.num_bytes for one in (unit, *self._started)) > self._most_bytes
        ):
            self._started.popleft().wait_for_gradients()
        unit.reduce_scatter()
        self._started.append(unit)

    def finish(self) -> None:
        """Wait for all."""
        while self._started:
            self._started.popleft().wait_for_gradients()
