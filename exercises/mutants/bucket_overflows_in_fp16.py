"""With fp16 on the wire the loss becomes nan: a gradient is rounded to fp16 before it is divided."""

from comm.collectives import all_reduce

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._launch"
KILLER = "tests.data_parallel.test_bucket_overlap.test_fp16_does_not_overflow_where_the_sum_over_ranks_would"


def mutant(self, k: int) -> None:
    bucket = self.buckets[k]
    wire = bucket.flat.to(self._wire_dtype)
    handle = all_reduce(wire, op="mean", group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, wire, handle))
