"""With fp16 buckets the loss becomes nan: gradients are rounded to fp16 before they are divided."""

import torch
from torch import Tensor

TARGET = "data_parallel.wire_format.to_wire"
KILLER = (
    "tests.data_parallel.test_bucket_overlap"
    ".test_a_mean_in_fp16_buckets_does_not_overflow_even_if_the_sum_would"
)
CAUSE = "overflows to inf"


def mutant(numbers: Tensor, dtype: torch.dtype, ranks: int) -> tuple[Tensor, str]:
    return numbers.to(dtype), "mean"
