"""Rank 0 loses its own gradients: a reduce-scatter by tree overwrites them with the sum of all ranks."""

import torch

from comm.algorithms import tree
from comm.algorithms.sharded_tree import scatter
from comm.transport.wire import Wire

TARGET = "comm.algorithms.sharded_tree.reduce_scatter"
KILLER = "tests.comm.test_collectives_by_hand.test_a_reduce_scatter_does_not_change_the_full_tensor"
CAUSE = "a tensor of the caller written to"
SYMPTOM = "After a reduce-scatter by tree rank 0's own gradients have changed."


def mutant(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    tree.reduce(wire, full, op, root=0)
    scatter(wire, shard, full if wire.rank == 0 else None, root=0, numel=full.numel())
