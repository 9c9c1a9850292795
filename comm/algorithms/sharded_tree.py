"""Binomial tree patterns for shards: a message carries the shards of all ranks in a subtree of tree.py.

      round 1   0 ────── 4567 ──────► 4                       In a scatter the root sends half of the
      round 2   0 ── 23 ──► 2         4 ── 67 ──► 6           tensor, then a quarter, then an eighth. A
      round 3   0 ─1► 1     2 ─3► 3   4 ─5► 5     6 ─7► 7     rank sends on all that is not its own shard.

A gather takes the same tree in the other direction, round 3 first. For B bytes on n ranks each of the two
takes L alpha + (n-1)/n B beta seconds, with L = ceil(log2 n) rounds (cost.py). The root's link carries as
many bytes as with the flat pattern (star.py), in L messages instead of n-1.

An all-gather is a gather to rank 0, and then a broadcast. A reduce-scatter is a reduce to rank 0, and then a
scatter. Each takes 2 L alpha + (L + (n-1)/n) B beta. On many ranks that is less latency than the (n-1) alpha
of a ring, but many more bytes: a broadcast and a reduce send the full tensor in every round.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

import torch

from comm.algorithms import tree
from comm.shards import shard_sizes
from comm.wire.wire import Wire


def scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor | None, root: int, numel: int) -> None:
    """Write this rank's part of the root's `full`, which has `numel` elements, to `shard`."""
    parent, children = tree.family(wire, root)
    sizes = _block_sizes(wire, root, numel, len(children))
    if parent is None:
        assert full is not None
        block = full.roll(-_start(wire, root, numel))
    else:
        block = shard.new_empty(sum(sizes))
        wire.irecv(block, parent).wait()
    own, *parts = block.split(sizes)
    shard.copy_(own)
    for child, part in zip(children, reversed(parts), strict=True):
        wire.isend(part, child).wait()  # one at a time, as in a broadcast


def gather(wire: Wire, full: torch.Tensor | None, shard: torch.Tensor, root: int, numel: int) -> None:
    """Write the shards of all ranks, in rank order, to the root's `full`, which has `numel` elements."""
    parent, children = tree.family(wire, root)
    sizes = _block_sizes(wire, root, numel, len(children))
    block = shard.new_empty(sum(sizes))
    own, *parts = block.split(sizes)
    own.copy_(shard)
    places = zip(parts, reversed(children), strict=True)
    for transfer in [wire.irecv(part, child) for part, child in places]:
        transfer.wait()
    if parent is None:
        assert full is not None
        full.copy_(block.roll(_start(wire, root, numel)))
    else:
        wire.isend(block, parent).wait()


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the shards of all ranks, in rank order, to every rank's `full`."""
    gather(wire, full if wire.rank == 0 else None, shard, root=0, numel=full.numel())
    tree.broadcast(wire, full, root=0)


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """Reduce `full` over all ranks, and write this rank's part to `shard`.

    `full` does not change, except where `shard` is the rank's part of it.
    """
    total = full.clone() if wire.rank == 0 else full  # a reduce changes the root's tensor only
    tree.reduce(wire, total, op, root=0)
    scatter(wire, shard, total if wire.rank == 0 else None, root=0, numel=full.numel())


def _block_sizes(wire: Wire, root: int, numel: int, num_children: int) -> list[int]:
    """Return the sizes of this rank's shard and of its children's blocks, the smallest subtree first.

    The block of a rank is the shards of its subtree, in order of positions (tree.py). Its own shard comes
    first. The children's blocks follow: the next position, the next two, the next four, and so on.
    """
    sizes = shard_sizes(numel, wire.size)
    by_position = sizes[root:] + sizes[:root]
    from_here = by_position[(wire.rank - root) % wire.size :]
    return [from_here[0], *(sum(from_here[1 << i : 2 << i]) for i in range(num_children))]


def _start(wire: Wire, root: int, numel: int) -> int:
    """Return where the root's shard starts in a tensor in rank order; in order of positions it is first."""
    return sum(shard_sizes(numel, wire.size)[:root])
