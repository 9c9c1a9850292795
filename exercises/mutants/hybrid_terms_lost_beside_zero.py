"""With ZeRO norms drift apart: their terms are added up in gradients that ZeRO has already taken and sent."""

from torch import Tensor

from hybrid_parallel.hybrid import HybridParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel._one_backward"
KILLER = (
    "tests.hybrid_parallel.test_equivalence.test_divided_tokens_and_gradients_in_shards_equal_one_process"
)
CAUSE = "added up over the tensor group"


def mutant(self: HybridParallel, x: Tensor, y: Tensor) -> Tensor:
    with self.in_precision():
        loss = self._through_stages(x, y) if self.pipeline else self._in_one_stage(x, y)
    if self.pipeline is not None:
        self.pipeline.finish_gradient_sync()
    if self.data is not None:
        self.data.finish_gradient_sync()
    if self.terms is not None and not self.sizes.zero:
        self.terms.finish_gradient_sync()
    return loss
