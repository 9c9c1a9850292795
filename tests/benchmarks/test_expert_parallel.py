"""The benchmark of expert parallelism: its formula is that of the bytes sent, and each row says its size."""

from typing import Any

import pytest

from benchmarks import expert_parallel
from benchmarks.expert_parallel import MOE, formula, rows_of
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


def test_a_row_has_the_slowest_rank_and_the_rank_that_sends_most(monkeypatch: pytest.MonkeyPatch):
    def rank(sent: int, seconds: float) -> list[Any]:
        times = {"expert_parallel": [seconds], "replicated": [4.0]}
        return [({"expert_parallel": sent, "replicated": 100}, [times, times])]

    monkeypatch.setattr(expert_parallel, "run_ranks", lambda *_, **__: [rank(20, 1.0), rank(50, 2.0)])
    rows = rows_of(2, [(64, 256)], 1)
    found = [(row["what"], row["link"], row["ratio"]) for row in rows]
    assert found == [
        ("formula d=64 t=256", "any", 0.25),
        ("sent d=64 t=256", "any", 0.5),
        ("step d=64 t=256", "loopback", 0.5),
        ("step d=64 t=256", "1gbit", 0.5),
    ]
