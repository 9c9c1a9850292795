"""Replicas are compared bit for bit."""

import torch
from torch import nn

from lab.cluster import Cluster
from lab.ranks import run_ranks
from training.replicas import replicas_equal


def test_replicas_are_equal_only_if_every_rank_holds_the_same_bits():
    def work(cluster: Cluster) -> tuple[bool, bool]:
        torch.manual_seed(0)
        module = nn.Linear(2, 2)
        same = replicas_equal(cluster, module)
        if cluster.rank == 2:
            module.bias.data[0] += 1e-6
        return same, replicas_equal(cluster, module)

    assert run_ranks(work, 3) == [(True, False)] * 3
