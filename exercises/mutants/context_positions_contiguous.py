"""The loss is too high from the first step: a rank counts positions as if its tokens were one piece."""

import torch
from torch import Tensor

TARGET = "context_parallel.sequence_cut.SequenceCut.positions"
KILLER = "tests.context_parallel.test_mutant_killers.test_a_rank_uses_its_own_positions_and_targets"
CAUSE = "its own position in the full sequence"
SYMPTOM = "The loss is not that of one process, from the first step on."


def mutant(self, rank: int) -> Tensor:
    begin = sum(self.length(before) for before in range(rank))
    return torch.arange(begin, begin + self.length(rank))
