"""Gradients are wrong without an error when the optimizer steps between a forward and its backward."""

import torch

TARGET = "zero.freed.Note.view"
KILLER = "tests.zero.test_zero3_refusals.test_a_backward_after_the_optimizers_step_is_refused"
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(self) -> torch.Tensor:
    self.unit.gather()
    nothing = torch.empty(0, dtype=self.dtype)
    return nothing.set_(self.unit.full.untyped_storage(), self.offset, self.shape, self.stride)
