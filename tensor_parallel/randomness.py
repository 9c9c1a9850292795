"""Draw dropout masks that are equal on all ranks where all compute the same, and different elsewhere.

      residual stream, full on every rank        one mask for all; else the ranks' activations differ
      heads or tokens of one rank                a mask of its own; else n shards repeat one mask

torch's generator has the same seed on all ranks, so it draws the same numbers everywhere. Each rank has a
second state of the generator, for what it computes alone. Megatron-LM calls this CudaRNGStatesTracker.
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
    """This rank's own stream of random numbers, beside torch's, which gets rank 0's seed here."""

    def __init__(self, group: Group = None) -> None:
        seed = torch.tensor([torch.initial_seed() % 2**62], device=message_device(group))
        broadcast(seed, root=0, group=group)
        torch.manual_seed(int(seed))
        self._seed = int(seed) + 1 + dist.get_rank(group)
        self._states: dict[torch.device, Tensor] = {}

    @contextlib.contextmanager
    def used(self, device: torch.device, probability: float = 1.0) -> Iterator[None]:
        """Make torch draw from this rank's stream inside the block; does nothing where `probability` is 0."""
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
    """nn.Dropout that draws its masks from this rank's own stream."""

    def __init__(self, p: float, randomness: RankRandomness) -> None:
        super().__init__()
        self.p, self._randomness = p, randomness

    def forward(self, x: Tensor) -> Tensor:
        with self._randomness.used(x.device, self.p if self.training else 0.0):
            return F.dropout(x, self.p, self.training)
