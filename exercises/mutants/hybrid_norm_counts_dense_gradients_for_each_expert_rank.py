"""With divided experts a run clips harder: what is no expert counts in the norm once for each expert rank."""

import torch.distributed as dist
from torch import Tensor

from hybrid_parallel.clipping import clip_over, counted_elsewhere
from hybrid_parallel.hybrid import HybridParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel.clip_grad_norm_"
KILLER = "tests.hybrid_parallel.test_clipping.test_divided_experts_count_once_and_so_does_everything_else"
CAUSE = "Count it once"
SYMPTOM = "With experts on several ranks a run clips harder, and trains more slowly, than with all on each."


def mutant(self: HybridParallel, max_norm: float) -> Tensor:
    groups = [self.mesh.pipeline, self.mesh.tensor]
    gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
    uncounted = counted_elsewhere(self.pipeline, self.tensor)
    if self.sizes.zero:
        groups.append(self.mesh.replicas)
        gradients = [(piece.parameter, piece.tensor.grad) for piece in self.pieces]
    if self.experts is not None:
        groups.append(self.experts.groups.experts)
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    return clip_over(groups, gradients, uncounted, max_norm, self.pattern, self.device)
