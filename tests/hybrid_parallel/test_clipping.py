"""Clipping on a mesh works on ranks that have nothing to add up."""

import torch
from torch import nn

from hybrid_parallel.clipping import clip_over
from lab.cluster import Cluster
from lab.ranks import run_ranks


def test_the_norm_of_a_rank_without_gradients_is_that_of_all():
    def work(cluster: Cluster) -> tuple[float, bool]:
        parameter = nn.Parameter(torch.zeros(2))
        gradient = torch.tensor([3.0, 4.0]) if cluster.rank == 0 else None
        norm = clip_over((None,), [(parameter, gradient)], set(), 1.0, None)
        return norm.item(), norm.dtype == torch.float64

    assert run_ranks(work, 2) == [(5.0, True), (5.0, True)]
