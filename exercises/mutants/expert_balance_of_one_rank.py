"""Experts are balanced on each rank, and not over the batch: the loss depends on the number of ranks."""

import torch.distributed as dist
from torch import Tensor

TARGET = "expert_parallel.balancing.auxiliary_loss"
KILLER = "tests.expert_parallel.test_equivalence.test_the_auxiliary_loss_counts_the_tokens_of_all_ranks"
CAUSE = "are the counts those of all ranks"
SYMPTOM = "With a balancing loss, training depends on the number of ranks."


def mutant(probabilities_tE: Tensor, chosen_rE: Tensor) -> Tensor:
    chosen_E = chosen_rE[dist.get_rank()]
    f_E = chosen_E.to(probabilities_tE.dtype) / chosen_E.sum()
    return len(f_E) * (f_E * probabilities_tE.mean(0)).sum()
