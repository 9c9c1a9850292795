"""Experts are balanced on each rank, and not over the batch: the loss depends on the number of ranks."""

import torch.distributed as dist
from torch import Tensor

TARGET = "expert_parallel.balancing.auxiliary_loss"
KILLER = "tests.expert_parallel.test_equivalence.test_the_auxiliary_loss_counts_the_tokens_of_all_ranks"
CAUSE = "are the counts those of all ranks"
SYMPTOM = "With a balancing loss, training depends on the number of ranks."


def mutant(probabilities_te: Tensor, chosen_re: Tensor) -> Tensor:
    chosen_e = chosen_re[dist.get_rank()]
    f_e = chosen_e.to(probabilities_te.dtype) / chosen_e.sum()
    return len(f_e) * (f_e * probabilities_te.mean(0)).sum()
