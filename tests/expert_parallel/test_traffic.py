"""Test that the bytes and messages which a rank sends in each step equal the formula exactly.

For E experts and s tokens of width d that go to other ranks, u that come from them, in one layer:

    counts           an all-gather of E numbers of 8 bytes
    all-to-alls      (s + u) d forward, the same backward
    gradients        an all-reduce of what is not an expert, one among replicas of what is
"""

import pytest
import torch

from comm.collectives import use_pattern
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.expected_traffic import traffic_per_step
from expert_parallel.train_moe import ExpertParallel
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from tests.expert_parallel.reference import gpt, text

ITEM, D = 8, 8


def a_step(cluster: Cluster, model: ExpertParallel) -> None:
    x, y = text()
    mine = slice(
        cluster.rank * len(x) // cluster.world_size, (cluster.rank + 1) * len(x) // cluster.world_size
    )
    loss_of(model(x[mine]), y[mine]).backward()
    model.finish_gradient_sync()


@pytest.mark.parametrize(("n", "expert_ranks"), [(1, 1), (3, 3), (4, 2)])
def test_a_step_sends_what_the_formula_says(n: int, expert_ranks: int):
    def count(cluster: Cluster) -> None:
        groups = form_groups(expert_ranks)
        for capacity, pattern in ((None, None), (1.0, None), (0.01, "tree"), (None, "torch")):
            for group in (None, groups.experts, groups.replicas):
                use_pattern(pattern, group)
            model = ExpertParallel(gpt(), MoEConfig(12, 2, capacity), groups)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(2):
                LEDGER.clear()
                a_step(cluster, model)
                assert LEDGER.total() == traffic_per_step(model), (capacity, pattern)
                optimizer.step()

    run_ranks(count, n)


def test_only_tokens_for_other_ranks_are_sent():
    def count(cluster: Cluster) -> None:
        model = ExpertParallel(gpt(), MoEConfig(4, 1), form_groups(2))
        LEDGER.clear()
        a_step(cluster, model)
        sent = {entry.op: t.bytes_sent for entry, t in LEDGER.rows().items() if entry.pattern != "header"}
        own, other = cluster.rank, 1 - cluster.rank
        tokens = sum(
            int(layer.sent_rE[own].view(2, 2)[other].sum() + layer.sent_rE[other].view(2, 2)[own].sum())
            for layer in model.layers
        )
        numel = sum(parameter.numel() for parameter in model.dense)
        assert sent["all_to_all"] == 2 * tokens * D * ITEM
        assert sent["all_gather"] == len(model.layers) * 4 * 8
        assert sent["all_reduce"] == numel * ITEM

    run_ranks(count, 2)
