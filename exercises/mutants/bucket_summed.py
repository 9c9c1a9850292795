"""Every bucket holds the sum over ranks: with SGD, twice the ranks is twice the learning rate."""

from comm.collectives import all_reduce

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._launch"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"


def mutant(self, k: int) -> None:
    bucket = self.buckets[k]
    if k == len(self.buckets) - 1:
        bucket.extra.fill_(1)
    handle = all_reduce(bucket.flat, op="sum", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, bucket.flat, handle))
