"""In a GAN gradients that were dropped are averaged together with those of the next microbatch."""

from torch import Tensor

TARGET = "zero.sharded_optimizer.ShardedOptimizer._has_arrived"
KILLER = (
    "tests.zero.test_sharded_loops"
    ".test_a_dropped_backward_through_some_layers_does_not_change_later_microbatches"
)
CAUSE = "given up"
SYMPTOM = "In a GAN the gradients of a microbatch are sometimes wrong."


def mutant(self, parameter: Tensor) -> bool:
    if not self._guard.has_gradient(parameter):
        return False
    self._steps.before_gradient(is_second=parameter in self._arrivals)
    if self._steps.drops_a_backward():
        self._drop_gradients()
        self._used.clear()
    self._used.add(parameter)
    return True
