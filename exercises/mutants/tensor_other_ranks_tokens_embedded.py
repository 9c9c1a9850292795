"""Embeddings are wrong: each rank adds its first row for every token that another rank owns."""

import torch.nn.functional as F
from torch import Tensor

from comm.functions import scatter_sums, sum_over_ranks
from tensor_parallel.layers import own_rows

TARGET = "tensor_parallel.layers.VocabParallelEmbedding.forward"
KILLER = "tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process"
CAUSE = "zeros for what it does not own"


def mutant(self, tokens: Tensor) -> Tensor:
    mine, _ = own_rows(tokens, len(self.weight), self.vocab_size, self.group)
    term = F.embedding(mine, self.weight)
    return scatter_sums(term, 1, self.group) if self.sequence_parallel else sum_over_ranks(term, self.group)
