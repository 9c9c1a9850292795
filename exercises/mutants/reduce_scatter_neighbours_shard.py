"""A sharded optimizer diverges: each rank gets the gradients of its neighbour's shard."""

import torch

from comm.algorithms.pairwise import all_to_all
from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import shards_of
from comm.transport.wire import Wire

TARGET = "comm.algorithms.pipelined_ring.reduce_scatter"
KILLER = "tests.comm.test_collectives_by_hand.test_a_reduce_scatter_gives_each_rank_its_own_shard"
CAUSE = "place of its rank"


def mutant(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    n = wire.size
    shards = shards_of(full, n)
    rotated = torch.cat(shards[1:] + shards[:1])  # the loop over ranks begins at 1
    arrived = torch.empty(n * shard.numel(), dtype=shard.dtype)
    all_to_all(wire, arrived, rotated, [shard.numel()] * n, [len(s) for s in shards[1:] + shards[:1]])
    contributions = arrived.view(n, -1)
    shard.copy_(contributions[0])
    for contribution in contributions[1:]:
        combine(op, shard, contribution, out=shard)
    divide_if_mean(op, shard, n)
