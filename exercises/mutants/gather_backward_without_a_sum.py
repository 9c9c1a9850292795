"""With sequence parallel gradients are too small: an all-gather's backward leaves out all other ranks."""

from torch import Tensor

from comm.collectives import Group
from comm.functions import gather_from_ranks

TARGET = "comm.functions.gather_tokens"
KILLER = "tests.comm.test_functions.test_cheaper_functions_equal_those_they_are_composed_of"
CAUSE = "adds up the gradients of all ranks"


def mutant(x: Tensor, dim: int, group: Group = None) -> Tensor:
    return gather_from_ranks(x, dim, group)
