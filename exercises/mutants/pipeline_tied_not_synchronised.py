"""The embedding and the head share a weight in the model, but each rank trains its own copy."""

TARGET = "pipeline_parallel.pipeline.Pipeline.finish_gradient_sync"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_both_copies_of_a_tied_embedding_get_both_gradients"
CAUSE = "both copies"
SYMPTOM = "The embedding and the head share a weight, and after some steps they do not."


def mutant(self) -> None:
    pass
