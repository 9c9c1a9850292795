"""torch's clip_grad_norm_ scales each rank's shards of a stage 3 model by a different factor."""

import torch

TARGET = "training.gradient_part.GradientPart.norm_of_one"
KILLER = "tests.zero.test_zero3_torch_tools.test_torchs_own_clipping_uses_the_norm_over_all_ranks"
CAUSE = "one rank's part"


def mutant(part, ord=2, **_):
    return torch.linalg.vector_norm(part, ord)
