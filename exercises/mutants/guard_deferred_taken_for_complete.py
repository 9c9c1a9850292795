"""With zero bubble schedules the weights of all but the first microbatch are missing in the mean."""

from torch import Tensor

TARGET = "data_parallel.guard.ReplicaGuard.has_gradient"
KILLER = (
    "tests.data_parallel.test_late_gradients."
    "test_weight_gradients_that_are_computed_after_the_backward_are_all_in_the_mean"
)
# The reduction races with what is added to the gradient: it takes a part of it, or comes a step too early.
FAILS_WITH = ("AssertionError", "Another backward began before finish_gradient_sync()")


def mutant(self, parameter: Tensor) -> bool:
    return parameter.grad is not None
