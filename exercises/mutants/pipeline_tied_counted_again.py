"""With accumulation a tied embedding learns too fast: the other rank's earlier gradient is added twice."""

TARGET = "pipeline_parallel.tied.NewGradients.take"
KILLER = "tests.pipeline_parallel.test_tied.test_a_tied_gradient_counts_once_after_two_accumulated_steps"
CAUSE = "counted again"


def mutant(self, parameter):
    self._versions.pop(parameter, None)
    self._new.pop(parameter, None)
    return None if parameter.grad is None else parameter.grad.clone()
