"""1F1B needs as much memory as GPipe: activations are kept after the backward that has used them."""

import torch

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.backward_input"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers.test_1f1b_holds_no_more_microbatches_than_ranks_come_after"
)
CAUSE = "kept"


def mutant(self, microbatch: int, dy):
    x, edge = self._begun[microbatch]
    if edge is not None:
        torch.autograd.backward([edge], [dy])
    return x.grad
