"""The optimizer never sees the mean: gradients are copied into a bucket, and param.grad is no view of it."""

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._move_in"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"


def mutant(self, i: int) -> None:
    self._place[i][1].copy_(self.trained[i].grad)
