"""Layers get each other's gradients when ranks compute their gradients in different orders."""

from torch import Tensor

TARGET = "zero.gradient_arrivals.GradientArrivals.add"
KILLER = "tests.zero.test_zero_mutant_killers.test_the_backward_of_one_rank_may_run_in_another_order"
CAUSE = "one order on which they have agreed"
SYMPTOM = "When ranks compute their gradients in different orders, layers learn from wrong gradients."


def mutant(self, parameter: Tensor) -> None:
    number = self._number[parameter]
    self._missing[number].discard(parameter)
    self._arrived.add(parameter)
    if not self._missing[number]:
        self._launch(self._buckets[number])
