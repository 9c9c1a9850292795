"""Compressed buckets train as if the learning rate were divided by the ranks: divided, and then averaged."""

from torch import Tensor

TARGET = "data_parallel.bucket_layout.Bucket.to_wire"
KILLER = "tests.data_parallel.test_bucket_overlap.test_fp16_does_not_overflow_where_the_sum_over_ranks_would"


def mutant(self, ranks: int) -> tuple[Tensor, str]:
    return (self._numbers / ranks).to(self._wire_dtype), "mean"
