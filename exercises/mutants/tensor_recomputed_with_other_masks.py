"""Gradients are wrong with dropout and recomputation: heads get other masks in the second forward."""

import contextlib
from collections.abc import Iterator

import torch

TARGET = "tensor_parallel.randomness.RankRandomness.used"
KILLER = "tests.tensor_parallel.test_dropout.test_blocks_computed_again_in_the_backward_draw_the_same_masks"
CAUSE = "must draw the same mask"


@contextlib.contextmanager
def mutant(self, device, probability: float = 1.0) -> Iterator[None]:
    if not probability:
        yield
        return
    shared = torch.get_rng_state()
    if not hasattr(self, "_own"):
        torch.manual_seed(torch.initial_seed() + 1 + self._rank)
    else:
        torch.set_rng_state(self._own)
    try:
        yield
    finally:
        self._own = torch.get_rng_state()
        torch.set_rng_state(shared)
