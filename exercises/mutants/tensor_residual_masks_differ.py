"""The residual stream differs by rank: each rank draws its dropout masks from another seed."""

import torch
import torch.distributed as dist

TARGET = "tensor_parallel.randomness.RankRandomness.__init__"
KILLER = (
    "tests.tensor_parallel.test_dropout"
    ".test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one"
)
CAUSE = "must draw the same mask"


def mutant(self, group=None) -> None:
    self._rank = dist.get_rank(group)
    torch.manual_seed(1234 + self._rank)
