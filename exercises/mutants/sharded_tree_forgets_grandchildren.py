"""Rank 3 of four gets zeros from a scatter: rank 2, which sends to it, was sent its own shard and no more."""

import torch

from comm.algorithms import tree
from comm.algorithms.sharded_tree import _block_sizes, _start
from comm.shards import shard_sizes
from comm.transport.wire import Wire

TARGET = "comm.algorithms.sharded_tree.scatter"
KILLER = "tests.comm.test_collectives_by_hand.test_a_tree_scatters_to_each_rank_its_own_shard_from_every_root"
CAUSE = "Only zeros arrive"
SYMPTOM = "After a scatter by tree some ranks have zeros: on two ranks none, on four ranks one."


def mutant(wire: Wire, shard: torch.Tensor, full: torch.Tensor | None, root: int, numel: int) -> None:
    parent, children = tree.family(wire, root)
    sizes = _block_sizes(wire, root, numel, len(children))
    if parent is None:
        block = full.roll(-_start(wire, root, numel))
    else:
        block = shard.new_zeros(sum(sizes))
        if shard.numel():
            wire.irecv(block[: shard.numel()], parent).wait()
    own, *parts = block.split(sizes)
    shard.copy_(own)
    shards = shard_sizes(numel, wire.size)
    for child, part in zip(children, reversed(parts), strict=True):
        if shards[child]:
            wire.isend(part[: shards[child]], child).wait()
