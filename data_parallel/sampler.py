"""Who trains on which example: disjoint shares that together cover the data, shuffled anew each epoch.

      epoch 0   shuffled  7 2 9 4 0 3 8 1 6 5     rank 0: 7 4 8 5    rank 1: 2 0 1    rank 2: 9 3 6
      epoch 1   shuffled  3 8 5 1 9 0 2 7 4 6     ...

All ranks shuffle with the same seed, so that their shares fit together, and take every world_size-th example.
Without `set_epoch` each epoch repeats the first one's order: the model sees the same batches again and
again. torch.utils.data.DistributedSampler does the same, but repeats examples to make shares equal.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """Indices of `rank`'s share of `num_examples`, at most one longer than another rank's."""

    def __init__(self, num_examples: int, rank: int, world_size: int, seed: int = 0) -> None:
        self.num_examples, self.rank, self.world_size, self.seed = num_examples, rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Call before each epoch, on all ranks: it decides the shuffle."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        shuffle = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_examples, generator=shuffle)
        return iter(order[self.rank :: self.world_size].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.num_examples, self.world_size))
