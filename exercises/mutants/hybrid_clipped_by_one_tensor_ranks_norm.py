"""With ZeRO 3 beside tensor parallelism ranks clip differently: the norm is that of the data axis alone."""

from torch import Tensor

from hybrid_parallel.clipping import clip_over, counted_elsewhere
from hybrid_parallel.hybrid import HybridParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel.clip_grad_norm_"
KILLER = "tests.hybrid_parallel.test_equivalence.test_divided_layers_in_shards_of_zero_3_equal_one_process"
CAUSE = "it is that of one rank's part"


def mutant(self: HybridParallel, max_norm: float) -> Tensor:
    if self.sizes.zero == 3:
        return self.data.clip_grad_norm_(max_norm)
    axes = [self.mesh.pipeline, self.mesh.tensor]
    gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
    if self.sizes.zero:
        axes.append(self.mesh.data)
        gradients = [(piece.parameter, piece.tensor.grad) for piece in self.pieces]
    uncounted = counted_elsewhere(self.pipeline, self.tensor)
    return clip_over(axes, gradients, uncounted, max_norm, self.sizes.pattern)
