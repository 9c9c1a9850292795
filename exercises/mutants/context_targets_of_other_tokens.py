"""The loss hardly falls: tokens are cut in zigzag and their targets into contiguous pieces."""

import torch.nn.functional as F
from torch import Tensor

from context_parallel.sequence_cut import SequenceCut

TARGET = "context_parallel.parallel_model.ContextParallel.loss"
KILLER = "tests.context_parallel.test_mutant_killers.test_a_rank_uses_its_own_positions_and_targets"
CAUSE = "Are the targets cut as the tokens are?"
SYMPTOM = "The loss hardly falls, although the logits of the first step are right."


def mutant(self, logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    cut = SequenceCut.contiguous(targets_bt.shape[1], self.sequence.size)
    own = cut.own(targets_bt, self.sequence.rank)
    return F.cross_entropy(logits_btv.flatten(0, 1), own.flatten(), reduction="sum") / targets_bt.numel()
