"""Tokens see too little of the past, and some see the future: the causal mask counts within a block."""

from collections.abc import Iterator

from torch import Tensor

from context_parallel.sequence_cut import Part

TARGET = "context_parallel.sequence_cut.SequenceCut.parts"
KILLER = "tests.context_parallel.test_mutant_killers.test_no_query_attends_to_a_later_key"
CAUSE = "compare positions in the full sequence"
SYMPTOM = "The loss falls faster than it can, and the trained model writes nonsense."


def mutant(
    self, rank: int, source: int, is_causal: bool = True, documents: Tensor | None = None
) -> Iterator[Part]:
    """Yield the parts of the attention to the keys of rank `source`, for sequences of one document."""
    for _, queries in self._placed(rank):
        for _, keys in self._placed(source):
            yield Part(queries, keys, is_causal)
