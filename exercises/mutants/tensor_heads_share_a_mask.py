"""Dropout regularises less: attention heads on different ranks drop the same numbers."""

import contextlib
from collections.abc import Iterator

TARGET = "tensor_parallel.randomness.RankRandomness.used"
KILLER = (
    "tests.tensor_parallel.test_dropout"
    ".test_heads_of_different_ranks_have_different_masks_and_the_residual_stream_has_one"
)
CAUSE = "must draw the same mask"


@contextlib.contextmanager
def mutant(self, device, probability: float = 1.0) -> Iterator[None]:
    yield
