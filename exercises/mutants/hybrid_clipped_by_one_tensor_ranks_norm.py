"""With ZeRO 3 beside tensor parallelism ranks clip differently: the norm is that of the data axis alone."""

import torch.distributed as dist
from torch import Tensor

from hybrid_parallel.clipping import clip_over, counted_elsewhere
from hybrid_parallel.expert_axis import experts_of
from hybrid_parallel.hybrid import HybridParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel.clip_grad_norm_"
KILLER = "tests.hybrid_parallel.test_equivalence.test_divided_layers_in_shards_of_zero_3_equal_one_process"
CAUSE = "it is that of one rank's part"


def mutant(self: HybridParallel, max_norm: float) -> Tensor:
    if self.sizes.zero == 3:
        return self.data.clip_grad_norm_(max_norm)
    groups = [self.mesh.pipeline, self.mesh.tensor]
    gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
    uncounted = counted_elsewhere(self.pipeline, self.tensor)
    if self.sizes.zero:
        groups.append(self.mesh.replicas)
        gradients = [(piece.parameter, piece.tensor.grad) for piece in self.pieces]
    if self.experts is not None:
        groups.append(self.experts.groups.experts)
        if self.experts.groups.rank > 0:
            uncounted |= {*self.module.parameters()} - {*experts_of(self.module)}
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    return clip_over(groups, gradients, uncounted, max_norm, self.pattern, self.device)
