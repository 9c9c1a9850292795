"""The benchmark of expert parallelism: its formula is that of the bytes sent, and of the crossover."""

import pytest

from benchmarks.expert_parallel import MOE, formula
from comm.cost import pairwise_traffic, traffic
from expert_parallel.config import make_expert
from lab.models.model import GPTConfig


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_formula_is_what_collectives_send_if_all_experts_are_chosen_equally(ranks: int):
    width, tokens = 64, 256
    to_each = tokens * MOE.top_k // ranks * width
    there_and_back = 4 * pairwise_traffic([to_each] * ranks, 4, 0).bytes_sent
    weights = [p for p in make_expert(GPTConfig(width=width), 0, 0, 0).parameters() if p.dim() == 2]
    numel = MOE.num_experts * sum(weight.numel() for weight in weights)  # biases are left out
    averaged = traffic("all_reduce", "ring", numel, 4, ranks, 0).bytes_sent
    assert formula(width, tokens, ranks) == (there_and_back, averaged)


@pytest.mark.parametrize("width", [64, 256])
def test_both_sides_send_equally_much_at_the_crossover(width: int):
    for factor in (0.25, 1, 4):
        tokens = int(factor * 4 * MOE.num_experts * width / MOE.top_k)
        ours, theirs = formula(width, tokens, 4)
        assert ours / theirs == factor
