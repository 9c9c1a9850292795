"""Dropout that is the same on all ranks where they compute the same, and another where they do not.

      residual stream, whole on every rank      one mask for all, or the ranks drift apart
      heads, words, tokens of one rank          a mask of its own, or n parts repeat one pattern

torch's generator is seeded alike on all ranks, and so draws the same for all. Each rank has a second state
for what it does alone, as Megatron-LM's CudaRNGStatesTracker.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import Group, broadcast
from comm.transport.wire import message_device


class RankRandomness:
    """A random stream of this rank beside the one that all share, which is seeded here with rank 0's seed."""

    def __init__(self, group: Group = None) -> None:
        seed = torch.tensor([torch.initial_seed() % 2**62], device=message_device(group))
        broadcast(seed, root=0, group=group)
        torch.manual_seed(int(seed))
        self._seed = int(seed) + 1 + dist.get_rank(group)
        self._states: dict[torch.device, Tensor] = {}

    @contextlib.contextmanager
    def used(self, device: torch.device, probability: float = 1.0) -> Iterator[None]:
        """Inside, torch draws from this rank's stream; nothing is changed where `probability` is 0."""
        if not probability:
            yield
            return
        generator = torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        if device not in self._states:
            self._states[device] = torch.Generator(device).manual_seed(self._seed).get_state()
        shared = generator.get_state()
        generator.set_state(self._states[device])
        try:
            yield
        finally:
            self._states[device] = generator.get_state()
            generator.set_state(shared)


class RankDropout(nn.Module):
    """nn.Dropout with this rank's own stream."""

    def __init__(self, p: float, randomness: RankRandomness) -> None:
        super().__init__()
        self.p, self._randomness = p, randomness

    def forward(self, x: Tensor) -> Tensor:
        with self._randomness.used(x.device, self.p if self.training else 0.0):
            return F.dropout(x, self.p, self.training)
