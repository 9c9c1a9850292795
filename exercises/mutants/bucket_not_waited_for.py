"""Replicas drift apart, and only on a slow network: a step begins while its last buckets are still sent."""

from collections import deque

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._wait_for_all"
KILLER = "tests.data_parallel.test_loops.test_gradients_are_not_used_before_a_slow_link_has_brought_them"
CAUSE = "the average is not what is used"


def mutant(self) -> None:
    for bucket in self.buckets:
        bucket.missing = set(bucket.views)
    self._to_launch, self._in_flight = deque(self.buckets), []
