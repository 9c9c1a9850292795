"""The first and the last stage train different embeddings: the sum is taken over the replicas."""

from torch import Tensor

from comm.collectives import all_reduce
from hybrid_parallel.hybrid import HybridParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel._one_backward"
KILLER = "tests.hybrid_parallel.test_equivalence.test_a_tied_embedding_gets_the_sum_of_both_stages"
CAUSE = "both copies must get the sum"


def mutant(self: HybridParallel, x: Tensor, y: Tensor) -> Tensor:
    with self.in_precision():
        loss = self._through_stages(x, y) if self.pipeline else self._in_one_stage(x, y)
    if self.pipeline is not None:
        for parameter, _ in self.pipeline._shared():
            all_reduce(parameter.grad, op="mean", group=self.mesh.replicas)
        self.pipeline._new.forget()
    if self.data is not None:
        self.data.finish_gradient_sync()
    if self.terms is not None:
        self.terms.finish_gradient_sync()
    return loss
