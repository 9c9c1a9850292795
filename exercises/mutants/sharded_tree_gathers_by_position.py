"""A gathered checkpoint is wrong: a gather to rank 2 puts rank 2's shard first, as the tree counts ranks."""

import torch

from comm.algorithms import tree
from comm.algorithms.sharded_tree import _block_sizes
from comm.transport.wire import Wire

TARGET = "comm.algorithms.sharded_tree.gather"
KILLER = "tests.comm.test_collectives_by_hand.test_a_tree_gathers_shards_in_rank_order_at_every_root"
CAUSE = "wrong order"
SYMPTOM = (
    "A checkpoint that rank 2 gathers from shards by tree is wrong, and one that rank 0 gathers is right."
)


def mutant(wire: Wire, full: torch.Tensor | None, shard: torch.Tensor, root: int, numel: int) -> None:
    parent, children = tree.family(wire, root)
    sizes = _block_sizes(wire, root, numel, len(children))
    block = shard.new_empty(sum(sizes))
    own, *parts = block.split(sizes)
    own.copy_(shard)
    places = zip(parts, reversed(children), strict=True)
    for transfer in [wire.irecv(part, child) for part, child in places if part.numel()]:
        transfer.wait()
    if parent is None:
        full.copy_(block)
    elif block.numel():
        wire.isend(block, parent).wait()
