"""With compressed buckets training is slow: gradients are divided by the number of ranks twice."""

import torch
from torch import Tensor

TARGET = "data_parallel.wire_format.to_wire"
KILLER = (
    "tests.data_parallel.test_bucket_overlap"
    ".test_a_mean_in_fp16_buckets_does_not_overflow_even_if_the_sum_would"
)
CAUSE = "divided by their number once too often"


def mutant(numbers: Tensor, dtype: torch.dtype, ranks: int) -> tuple[Tensor, str]:
    return (numbers / ranks).to(dtype), "mean"
