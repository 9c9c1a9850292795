"""Ranks agree, the loss falls, and it is wrong: a row layer's output uses an n-th of the layer's inputs."""

import torch.nn.functional as F
from torch import Tensor

from comm.functions import gather_from_ranks, scatter_sums, split_to_ranks

TARGET = "tensor_parallel.layers.RowParallelLinear.forward"
KILLER = "tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process"
CAUSE = "add up the outputs of all ranks"


def mutant(self, x: Tensor) -> Tensor:
    if self.split_input:
        x = split_to_ranks(x, -1, self.group)
    term = F.linear(x, self.weight)
    if self.sequence_parallel:
        y = scatter_sums(term, 1, self.group)
    else:
        own = split_to_ranks(term, -1, self.group)
        y = gather_from_ranks(own, -1, self.group, term.shape[-1])
    return y if self.bias is None else y + self.bias.to(y.dtype)
