"""Flat patterns: the root sends to every other rank, or receives from every other rank, directly.

rank 1 ◄──┐                The root's link carries everything: (n-1) B bytes for a broadcast of B,
rank 2 ◄──┼── root         so it takes alpha + (n-1) B beta (cost.py). For few ranks or tiny tensors
rank 3 ◄──┘                that is hard to beat, because every message takes one hop.

A scatter and a gather move different data for each rank, so no algorithm sends fewer bytes than this one:
(n-1)/n B over the root's link.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import shards_of
from comm.wire.wire import Wire


def broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to every rank's."""
    if tensor.numel() == 0:
        return
    if wire.rank == root:
        for transfer in [wire.isend(tensor, peer) for peer in _others(wire, root)]:
            transfer.wait()
    else:
        wire.irecv(tensor, root).wait()


def scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor | None, root: int) -> None:
    """Write this rank's part of the root's `full` to `shard`."""
    if wire.rank != root:
        wire.irecv(shard, root).wait()
        return
    assert full is not None
    parts = shards_of(full, wire.size)
    leaving = [wire.isend(parts[peer], peer) for peer in _others(wire, root)]
    shard.copy_(parts[root])
    for transfer in leaving:
        transfer.wait()


def gather(wire: Wire, full: torch.Tensor | None, shard: torch.Tensor, root: int) -> None:
    """Write the shards of all ranks, in rank order, to the root's `full`."""
    if wire.rank != root:
        wire.isend(shard, root).wait()
        return
    assert full is not None
    parts = shards_of(full, wire.size)
    arriving = [wire.irecv(parts[peer], peer) for peer in _others(wire, root)]
    parts[root].copy_(shard)
    for transfer in arriving:
        transfer.wait()


def reduce(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    """Combine the other ranks' tensors, in rank order, with the root's `tensor`, in place."""
    if tensor.numel() == 0:
        return
    if wire.rank != root:
        wire.isend(tensor, root).wait()
        return
    for transfer in [wire.irecv(torch.empty_like(tensor), peer) for peer in _others(wire, root)]:
        transfer.wait()
        combine(op, tensor, transfer.tensor, out=tensor)
    divide_if_mean(op, tensor, wire.size)


def all_reduce(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Reduce to rank 0, which sends the result to every rank: its link carries 2(n-1) tensors."""
    reduce(wire, tensor, op, root=0)
    broadcast(wire, tensor, root=0)


def _others(wire: Wire, root: int) -> list[int]:
    return [peer for peer in range(wire.size) if peer != root]
