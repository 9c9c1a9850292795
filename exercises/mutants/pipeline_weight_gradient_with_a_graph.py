"""Memory grows in every step: weight gradients are computed with a graph, which keeps their inputs."""

TARGET = "pipeline_parallel.deferred.DeferredGradients.run"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers"
    ".test_when_weight_gradients_are_computed_nothing_they_needed_is_left"
)
CAUSE = "keep its graph"


def mutant(self) -> None:
    self.tensors.clear()
    while self.waiting:
        self.waiting.pop()()
