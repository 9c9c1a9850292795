"""Give each rank its examples: shares of equal length that together cover the data, shuffled in each epoch.

      epoch 0   shuffled  7 2 9 4 0 3 8 1 6 5     rank 0: 7 4 8 5    rank 1: 2 0 1 7    rank 2: 9 3 6 2
      epoch 1   shuffled  3 8 5 1 9 0 2 7 4 6     ...                              └ repeated ─────── ┘

All ranks shuffle with the same seed, and each takes every world_size-th example, so that ranks have different
examples. Without `set_epoch` every epoch has the order of the first one, and the same batches. Shares must
have equal length, because a rank with one batch more would wait for the others' gradients. So if the length
is not a multiple of the ranks, the first examples are repeated, or the last ones are left out, as in
torch.utils.data.DistributedSampler.
"""

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch.utils.data import Sampler

from lab.launch.errors import WorkbookError

Uneven = Literal["pad", "drop", "keep"]


class DistributedSampler(Sampler[int]):
    """Yields the indices of one rank's share of `num_examples` examples.

    `uneven` decides what happens if the number of ranks does not divide the examples: "pad" repeats the
    first ones, "drop" leaves the last ones out, "keep" gives some ranks one more, for evaluation, where no
    rank waits.
    """

    def __init__(
        self, num_examples: int, rank: int, world_size: int, seed: int = 0, uneven: Uneven = "pad"
    ) -> None:
        if uneven not in get_args(Uneven):
            raise WorkbookError(f"uneven={uneven!r}: choose one of {', '.join(get_args(Uneven))}.")
        if not isinstance(num_examples, int):
            raise WorkbookError("num_examples is a number: give len(dataset), and not the dataset.")
        if not 0 <= rank < world_size:
            raise WorkbookError(
                f"Rank {rank} is not one of {world_size} ranks, which are 0 to {world_size - 1}."
            )
        self.num_examples, self.seed = num_examples, seed
        self.rank, self.world_size = rank, world_size
        whole_rounds = num_examples // world_size * world_size
        padded = whole_rounds if whole_rounds == num_examples else whole_rounds + world_size
        self._total = {"pad": padded, "drop": whole_rounds, "keep": num_examples}[uneven]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next epoch; all ranks must call it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        shuffle = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.num_examples, generator=shuffle)
        if self._total > self.num_examples:
            order = order.repeat(-(-self._total // self.num_examples))
        return iter(order[self.rank : self._total : self.world_size].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self._total, self.world_size))
