"""The optimizer never sees the mean: gradients are copied into a bucket, and param.grad is no view of it."""

TARGET = "data_parallel.bucket_layout.Layout.move_in"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"


def mutant(self, i: int) -> None:
    self.view(i).copy_(self._parameters[i].grad)
