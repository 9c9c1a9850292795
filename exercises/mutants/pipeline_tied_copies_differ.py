"""Tied weights differ from the first step on, because only the first rank has loaded pretrained weights."""

TARGET = "pipeline_parallel.pipeline.Pipeline._make_ties_equal"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_tied_copies_are_equal_before_the_first_step"
CAUSE = "not started from rank 0's values"
SYMPTOM = "The two copies of a tied weight differ from the first step on."


def mutant(self) -> None:
    pass
