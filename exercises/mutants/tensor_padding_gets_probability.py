"""The loss is slightly too large: the padding of the vocabulary gets a share of the probability."""

from torch import Tensor

from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

TARGET = "tensor_parallel.parallel_model.TensorParallel.loss"
KILLER = "tests.tensor_parallel.test_parallelize.test_two_ranks_have_the_gradients_of_one_process"
CAUSE = "vocabulary's padding"


def mutant(self, logits_btw: Tensor, targets_bt: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(logits_btw, targets_bt, None, self.group)
