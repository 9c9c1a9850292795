"""Dropout regularises less on more ranks: all have the same seed, so their examples share one mask."""

import torch

TARGET = "training.randomness.seed_step"
KILLER = "tests.training.test_randomness.test_ranks_with_examples_of_their_own_draw_different_masks"
CAUSE = "the same again"


def mutant(seed: int, step: int, stream: int) -> None:
    torch.manual_seed(seed * 1_000_003 + step)
