"""Replicas drift apart: the optimizer uses each rank's own gradients, which are not views of the buckets."""

from torch import Tensor

TARGET = "data_parallel.train_bucket_overlap.Bucket.move_in"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"
CAUSE = "the average is not what is used"


def mutant(self, parameter: Tensor) -> None:
    self.views[parameter].copy_(parameter.grad)
