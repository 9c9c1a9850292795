"""Measure which activations a rank holds in memory after each action, and of how many microbatches.

A forward makes autograd save tensors for the backward. This file notes their storages, by weak references
that keep nothing alive, and counts after each action which of them still exist. So a microbatch that is kept
too long is found, whatever the schedule says. What a recomputation saves comes and goes within one backward,
and is not counted.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Place = tuple[int, int]  # stage and microbatch


class ActivationWatch:
    """Watches the tensors that forwards save during one step."""

    def __init__(self) -> None:
        self._ignored: set[StorageWeakRef] = set()
        self._noted: dict[Place, dict[StorageWeakRef, int]] = {}
        self._known: set[StorageWeakRef] = set()  # a storage that two stages save counts for the first
        self.peak_bytes = 0
        self.peak_held = 0
        self.kept_by_forward: dict[int, int] = {}
        self.kept_for_weight: dict[int, int] = {}

    def ignore(self, tensors: Iterable[Tensor | None]) -> None:
        """Ignore these tensors: parameters and batches are saved for the backward too, but are no
        activations.
        """
        self._ignored |= {
            StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor is not None
        }

    @contextmanager
    def saving(self, stage: int, microbatch: int) -> Iterator[None]:
        """Note what a forward of a microbatch saves, inside of the `with` block."""

        def pack(tensor: Tensor) -> Tensor:
            self._note((stage, microbatch), tensor)
            return tensor.detach()  # an output that its own node saved would keep itself alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.kept_by_forward[stage] = max(
            self._alive((stage, microbatch)), self.kept_by_forward.get(stage, 0)
        )

    def deferred(self, stage: int, microbatch: int, tensors: Iterable[Tensor]) -> None:
        """Note what is kept for the weight gradient, after an input gradient."""
        for tensor in tensors:
            self._note((stage, microbatch), tensor)
        self.kept_for_weight[stage] = max(
            self._alive((stage, microbatch)), self.kept_for_weight.get(stage, 0)
        )

    def update_peak(self) -> None:
        """Count what is held now, after an action, and keep the maximum."""
        alive = [self._alive(place) for place in list(self._noted)]
        self.peak_bytes = max(self.peak_bytes, sum(alive))
        self.peak_held = max(self.peak_held, sum(size > 0 for size in alive))

    def _note(self, place: Place, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in self._ignored and reference not in self._known:
            self._known.add(reference)
            self._noted.setdefault(place, {})[reference] = storage.nbytes()

    def _alive(self, place: Place) -> int:
        noted = self._noted.get(place, {})
        for reference in [reference for reference in noted if reference.expired()]:
            del noted[reference]
            self._known.discard(reference)
        return sum(noted.values())
