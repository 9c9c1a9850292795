"""A token id outside of the vocabulary becomes a vector of zeros instead of an error."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from comm.functions import scatter_sums, sum_over_ranks

TARGET = "tensor_parallel.layers.VocabParallelEmbedding.forward"
KILLER = "tests.tensor_parallel.test_layers.test_a_token_outside_of_the_vocabulary_is_refused_on_all_ranks"
FAILS_WITH = "DID NOT RAISE IndexError"
CAUSE = "check that must refuse it"


def mutant(self, tokens: Tensor) -> Tensor:
    mine = tokens - dist.get_rank(self.group) * len(self.weight)
    is_mine = (mine >= 0) & (mine < len(self.weight))
    term = F.embedding(mine.where(is_mine, 0), self.weight) * is_mine.unsqueeze(-1)
    return scatter_sums(term, 1, self.group) if self.sequence_parallel else sum_over_ranks(term, self.group)
