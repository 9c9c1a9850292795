"""Packed documents see one another: only the rank's own keys are masked, those that arrive are not."""

from context_parallel.sequence_cut import Part

TARGET = "context_parallel.parallel_model.SharedSequence.parts"
KILLER = "tests.context_parallel.test_mutant_killers.test_no_query_attends_to_another_document"
CAUSE = "of the keys that arrive, too"
SYMPTOM = "With --documents the loss depends on the number of ranks, and without it does not."


def mutant(self, source: int) -> list[Part]:
    documents = self.documents if source == self.rank else None
    return list(self.cut.parts(self.rank, source, self.is_causal, documents))
