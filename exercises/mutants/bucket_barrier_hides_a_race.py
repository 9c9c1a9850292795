"""Replicas drift apart on a slow network: a barrier stands for the waits, and it waits for no reduction."""

from collections import deque

import torch.distributed as dist

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._wait_for_all"
KILLER = "tests.data_parallel.test_loops.test_gradients_are_not_used_before_a_slow_link_has_brought_them"
CAUSE = "the average is not what is used"
SYMPTOM = "On this machine gradients are right in each run. On a slow network they are not averaged."


def mutant(self) -> None:
    # All ranks have started all reductions when the barrier ends. On a fast link these have then ended, too.
    dist.barrier(self.group)
    for bucket in self.buckets:
        bucket.missing = set(bucket.views)
    self._to_launch, self._in_flight = deque(self.buckets), []
