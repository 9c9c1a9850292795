"""Draw dropout masks that are equal on all ranks where all compute the same, and different elsewhere.

      residual stream, full on every rank        one mask for all; else the ranks' activations differ
      heads or tokens of one rank                a mask of its own; else n shards repeat one mask

torch's generator has the same seed on all ranks, so it draws the same numbers everywhere. For what a rank
computes alone, all ranks draw one number from it, and each adds its rank to get a seed of its own. So all
masks follow from the state of torch's generator: where that is restored, to compute a block again in the
backward or to resume from a checkpoint, the same masks are drawn again. Megatron-LM keeps a second state of
the generator instead (CudaRNGStatesTracker), and restores both.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm.collectives import Group, broadcast

_SEEDS = 2**62


class RankRandomness:
    """This rank's own random numbers, beside those of torch's generator, which gets rank 0's seed here."""

    def __init__(self, group: Group, device: torch.device) -> None:
        seed = torch.tensor([torch.initial_seed() % _SEEDS], device=device)
        broadcast(seed, root=0, group=group)
        torch.manual_seed(int(seed))
        self._rank = dist.get_rank(group)

    @contextlib.contextmanager
    def used(self, device: torch.device, probability: float = 1.0) -> Iterator[None]:
        """Let torch draw numbers of this rank inside the block; do nothing where `probability` is 0.

        All ranks must enter the block, because each draws one number from the generator that they share.
        """
        if not probability:
            yield
            return
        seed = int(torch.randint(_SEEDS, ())) + self._rank
        generator = torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        shared = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(shared)


class RankDropout(nn.Module):
    """Do what nn.Dropout does, with masks of this rank."""

    def __init__(self, p: float, randomness: RankRandomness) -> None:
        super().__init__()
        self.p, self._randomness = p, randomness

    def forward(self, x: Tensor) -> Tensor:
        with self._randomness.used(x.device, self.p if self.training else 0.0):
            return F.dropout(x, self.p, self.training)
