"""torch's own clip_grad_norm_ scales each rank's shards by another factor."""

import torch

TARGET = "training.gradient_part.GradientPart.norm_of_one"
KILLER = "tests.data_parallel.test_zero3_refusals.test_torchs_own_clipping_takes_the_norm_over_all_ranks"


def mutant(part, ord=2, **_):
    return torch.linalg.vector_norm(part, ord)
