"""With several microbatches gradients are wrong: each backward uses the last forward's activations."""

import torch

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.backward_input"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers.test_a_backward_uses_the_activations_of_its_own_microbatch"
)
CAUSE = "what its own microbatch's forward has kept"


def mutant(self, microbatch: int, dy):
    x, edge = self._begun.popitem()[1]
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad
