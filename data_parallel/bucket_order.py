"""The order in which gradients become ready: rank 0's in the first step, then that of all ranks' buckets.

      first step    as registered, backwards      rank 0 notes which gradient came when
      afterwards    as rank 0 has seen it         what was not used goes last

All ranks need one order, and a later backward usually takes the same one. As in PyTorch's
DistributedDataParallel: Li et al., VLDB 2020, section 3.2.3.
"""

from typing import Any

import torch
from torch import nn

from comm.collectives import Group, broadcast


class BucketOrder:
    """The numbers of the parameters in the order of the buckets: `now`, and soon what rank 0 has seen."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.now = list(range(len(parameters)))[::-1]
        self._device = parameters[0].device if parameters else None
        self._seen: list[int] | None = []  # in the first step, until its end
        self._next: list[int] | None = None
        self.was_sent = False

    def see(self, i: int) -> None:
        """Note that the gradient of parameter i is ready."""
        if self._seen is not None:
            self._seen.append(i)

    def forget(self) -> None:
        """Forget what was seen, for that backward does not count."""
        if self._seen is not None:
            self._seen = []

    def agree(self, group: Group) -> None:
        """At the end of the first step, send rank 0's order to all."""
        self.was_sent = self._seen is not None
        if self._seen is not None:
            order = self._seen + [i for i in self.now if i not in self._seen]
            message = torch.tensor(order, dtype=torch.int64, device=self._device)
            broadcast(message, root=0, group=group)
            if message.tolist() != self.now:
                self._next = message.tolist()
            self._seen = None

    def take(self) -> bool:
        """Go over to the order agreed on; False if it is in use already."""
        if self._next is None:
            return False
        self.now, self._next = self._next, None
        return True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the order decides how sums are rounded."""
        return {"order": self._next or self.now, "is_final": self._seen is None}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.now, self._next = list(state["order"]), None
        self._seen = None if state["is_final"] else []
