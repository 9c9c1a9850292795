"""Each rank clips by the norm of its own parts: what all have whole is scaled differently, and drifts."""

from torch import Tensor, nn

TARGET = "tensor_parallel.parallelize.TensorParallel.clip_grad_norm_"
KILLER = "tests.tensor_parallel.test_parallelize.test_what_all_ranks_have_counts_once_in_the_norm"


def mutant(self, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(self.parameters(), max_norm)
