"""With zero bubble schedules the mean lacks the weight gradients of all microbatches but the first."""

from torch import Tensor

TARGET = "data_parallel.guard.ReplicaGuard.has_gradient"
KILLER = (
    "tests.data_parallel.test_late_gradients"
    ".test_weight_gradients_computed_after_the_backward_are_in_the_mean"
)
# The reduction starts while gradients are still added up: it takes a part of them, or is a step too early. A
# race decides what it takes: ranks that take different parts differ, and others have the same wrong mean.
FAILS_WITH = ("AssertionError", "Another backward began before finish_gradient_sync()")
CAUSE = ("not averaged over the ranks", "look at what each rank puts in, before the ranks communicate")
SYMPTOM = "With zero bubble schedules the gradients are not the mean over all microbatches."


def mutant(self, parameter: Tensor) -> bool:
    return parameter.grad is not None
