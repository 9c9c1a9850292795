"""Test the initial weights of experts."""

import torch

from expert_parallel.config import make_expert
from lab.models.model import GPTConfig


def test_every_expert_starts_with_weights_of_its_own_which_its_numbers_decide():
    config = GPTConfig(width=8)
    places = [(seed, layer, e) for seed in (0, 1) for layer in (0, 1) for e in (0, 1, "shared")]
    first, again = ([make_expert(config, *place).state_dict() for place in places] for _ in range(2))
    for name in ("up_proj.weight", "down_proj.weight"):
        for i, one in enumerate(first):
            assert torch.equal(one[name], again[i][name])
            assert not any(torch.equal(one[name], other[name]) for other in first[:i])
