"""The optimizer never sees the mean: gradients are copied into a bucket, and param.grad is no view of it."""

from torch import Tensor

TARGET = "data_parallel.train_bucket_overlap.Bucket.move_in"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"


def mutant(self, parameter: Tensor) -> None:
    self.views[parameter].copy_(parameter.grad)
