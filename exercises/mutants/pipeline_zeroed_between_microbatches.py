"""Only the last microbatch trains the model: each backward clears the gradients of the earlier ones."""

import torch

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.backward_input"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_gradients_of_the_microbatches_add_up"
CAUSE = "cleared"
SYMPTOM = "With more microbatches the gradients of a batch become smaller."


def mutant(self, microbatch: int, dy):
    x, edge = self._begun.pop(microbatch)
    self.stage.zero_grad()
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad
