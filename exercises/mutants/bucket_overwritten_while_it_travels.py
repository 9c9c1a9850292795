"""In a GAN gradients are sometimes wrong: the next backward writes into buckets that are still being sent."""

from collections import deque

from torch import Tensor

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._drop_unfinished"
KILLER = (
    "tests.data_parallel.test_loops."
    "test_a_backward_does_not_write_into_buckets_of_dropped_gradients_while_these_travel"
)
CAUSE = "still on their way"


def mutant(self, parameter: Tensor) -> None:
    for bucket in self.buckets:
        bucket.missing = set(bucket.views)
    self._to_launch, self._in_flight = deque(self.buckets), []
