"""Choose the order of the gradients in the buckets: a guess for the first step, then what rank 0 observed.

      first step    the reverse of registration    rank 0 notes the order in which gradients come
      afterwards    the order that rank 0 noted    gradients that it did not see come last

All ranks need the same order, or their buckets would not match. Later backwards usually complete the
gradients in the same order as the first one. PyTorch's DistributedDataParallel does the same: Li et al.,
VLDB 2020, section 3.2.3.
"""

from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, broadcast


class BucketOrder:
    """The order of `parameters` in the buckets. `was_sent` tells whether the last step sent it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._numbers = list(range(len(parameters)))[::-1]  # positions in `parameters`
        self._seen: list[Tensor] | None = []  # None after the first step
        self.was_sent = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the buckets."""
        return [self._parameters[number] for number in self._numbers]

    def see(self, parameter: Tensor) -> None:
        """Note, in the first step, that the gradient of `parameter` is complete."""
        if self._seen is not None:
            self._seen.append(parameter)

    def forget(self) -> None:
        """Forget what was seen: that backward does not count."""
        if self._seen is not None:
            self._seen = []

    def adopt_observed(self, group: Group) -> bool:
        """After the first step, adopt the order that rank 0 observed. Return whether the order changed."""
        self.was_sent = self._seen is not None
        if self._seen is None:
            return False
        before, self._numbers = self._numbers, self._observed(self._seen)
        self._seen = None
        device = self._parameters[0].device if self._parameters else None
        message = torch.tensor(self._numbers, dtype=torch.int64, device=device)
        broadcast(message, root=0, group=group)
        self._numbers = message.tolist()
        return self._numbers != before

    def _observed(self, seen: list[Tensor]) -> list[int]:
        """Return the positions of the parameters in `seen`, and then those of all others."""
        number = {parameter: i for i, parameter in enumerate(self._parameters)}
        numbers = [number[parameter] for parameter in seen]
        return numbers + [i for i in self._numbers if i not in set(numbers)]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: the order decides how sums are rounded."""
        return {"order": self._numbers, "is_final": self._seen is None}

    def load(self, state: dict[str, Any]) -> None:
        """Take the order of a checkpoint."""
        self._numbers = list(state["order"])
        self._seen = None if state["is_final"] else []
