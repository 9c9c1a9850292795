"""Gradients of an fp16 model are inf where DDP's are finite: ranks add first and divide later."""

import torch

TARGET = "comm.algorithms.reduction.divisor_before"
KILLER = "tests.comm.test_all_reduce.test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would"
CAUSE = "overflows to inf"


def mutant(op: str, dtype: torch.dtype, ranks: int) -> int:
    return 1
