"""The loss is wrong on two ranks and more: results over the keys of several ranks are just averaged."""

import torch
from torch import Tensor

TARGET = "context_parallel.block_attention.join"
KILLER = "tests.context_parallel.test_mutant_killers.test_queries_meet_all_keys_and_gradients_come_home"
CAUSE = "in the proportion of their sums of exponentials"
SYMPTOM = "The loss is that of one process on one rank, and a different one for each other number of ranks."


def mutant(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    return (y + other_y) / 2, torch.logaddexp(lse, other_lse)
