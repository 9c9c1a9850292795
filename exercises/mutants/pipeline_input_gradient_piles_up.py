"""A stage sends gradients that are too large: those of earlier microbatches are added to each of them."""

import torch

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.backward_input"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers"
    ".test_a_stage_between_others_hands_back_the_gradient_of_its_own_input"
)
CAUSE = "to which the next one is added"


def mutant(self, microbatch: int, dy):
    x, edge = self._begun.pop(microbatch)
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    before = getattr(self, "_before", None)
    self._before = x.grad if before is None or x.grad is None else x.grad + before
    return self._before
