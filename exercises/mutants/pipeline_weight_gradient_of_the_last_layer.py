"""Only one layer of a stage learns: the loop over the deferred gradients ends too early."""

import torch

TARGET = "pipeline_parallel.deferred.DeferredGradients.run"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers.test_a_split_backward_computes_every_weights_gradient_once"
)
CAUSE = "is it not computed"


@torch.no_grad()
def mutant(self) -> None:
    self.tensors.clear()
    if self.waiting:
        self.waiting.pop()()
    self.waiting.clear()
