"""A row layer's bias is added n times, which shows only when biases are not zero."""

import torch.nn.functional as F
from torch import Tensor

from comm.functions import scatter_sums, split_to_ranks, sum_over_ranks

TARGET = "tensor_parallel.layers.RowParallelLinear.forward"
KILLER = "tests.tensor_parallel.test_layers.test_the_bias_of_a_row_layer_is_added_once"
CAUSE = "added up twice"
SYMPTOM = "A row layer's output is wrong, but only when its bias is not zero."


def mutant(self, x: Tensor) -> Tensor:
    if self.split_input:
        x = split_to_ranks(x, -1, self.group)
    term = F.linear(x, self.weight, self.bias)
    if self.sequence_parallel:
        return scatter_sums(term, 1, self.group)
    return sum_over_ranks(term, self.group)
