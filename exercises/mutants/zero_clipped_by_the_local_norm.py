"""Each rank scales its shard by another factor: the clipped gradient points elsewhere, and is too long."""

from torch import Tensor, nn

TARGET = "data_parallel.clipping.clip_grad_norm_"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_gradients_are_clipped_by_the_norm_over_all_shards"


def mutant(pieces: list[nn.Parameter], max_norm: float, group, pattern) -> Tensor:
    return nn.utils.clip_grad_norm_(pieces, max_norm)
