"""With accumulation norms learn too fast: gradients that were reduced already are reduced again."""

from contextlib import contextmanager

TARGET = "tensor_parallel.accumulation.PartialGradients.completing"
KILLER = (
    "tests.tensor_parallel.test_plausible_use.test_gradients_of_norms_count_once_after_two_accumulated_steps"
)
CAUSE = "counted again"


@contextmanager
def mutant(self, parameters):
    yield [parameter.grad for parameter in parameters if parameter.grad is not None]
