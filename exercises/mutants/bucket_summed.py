"""Buckets hold the sum over ranks: with SGD, twice as many ranks double the learning rate."""

from comm.collectives import all_reduce
from data_parallel.train_bucket_overlap import Bucket

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._launch"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"
CAUSE = "sum over ranks that should be a mean"
SYMPTOM = "With SGD, twice as many ranks double the learning rate, and with Adam the loss looks normal."


def mutant(self, bucket: Bucket) -> None:
    bucket.flags.fill_(1)
    work = all_reduce(bucket.flat, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append(work)
