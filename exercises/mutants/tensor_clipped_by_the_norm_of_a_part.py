"""torch's clip_grad_norm_ scales each rank's shards of a tensor parallel model by a different factor."""

import torch

TARGET = "training.gradient_part.GradientPart.norms"
KILLER = "tests.tensor_parallel.test_parallelize.test_torchs_own_clipping_uses_the_norm_of_the_full_model"
CAUSE = "one rank's part"


def mutant(parts, ord=2, dtype=None, **_):
    return [torch.linalg.vector_norm(part, ord, dtype=dtype) for part in parts]
