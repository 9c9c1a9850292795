"""Flat patterns: one root deals with every other rank itself; for scatter and gather the best there is.

rank 1 ◄──┐                The root's link carries everything: n-1 times the tensor for a
rank 2 ◄──┼── root         broadcast. Between few ranks or for tiny tensors it is still hard to
rank 3 ◄──┘                beat, since nobody waits for a second hop.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import shards_of
from comm.transport.wire import Wire


def broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """Every rank's `tensor` becomes the root's."""
    if tensor.numel() == 0:
        return
    if wire.rank == root:
        for transfer in [wire.isend(tensor, peer) for peer in _others(wire, root)]:
            transfer.wait()
    else:
        wire.irecv(tensor, root).wait()


def scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor | None, root: int) -> None:
    """`shard` becomes this rank's part of the root's `full`."""
    if wire.rank != root:
        if shard.numel():
            wire.irecv(shard, root).wait()
        return
    assert full is not None
    parts = shards_of(full, wire.size)
    leaving = [wire.isend(parts[peer], peer) for peer in _others(wire, root) if parts[peer].numel()]
    shard.copy_(parts[root])
    for transfer in leaving:
        transfer.wait()


def gather(wire: Wire, full: torch.Tensor | None, shard: torch.Tensor, root: int) -> None:
    """The root's `full` becomes all ranks' shards in rank order."""
    if wire.rank != root:
        if shard.numel():
            wire.isend(shard, root).wait()
        return
    assert full is not None
    parts = shards_of(full, wire.size)
    arriving = [wire.irecv(parts[peer], peer) for peer in _others(wire, root) if parts[peer].numel()]
    parts[root].copy_(shard)
    for transfer in arriving:
        transfer.wait()


def reduce(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    """The root's `tensor` becomes the reduction of all; the root adds them up in rank order."""
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
    """Reduce to rank 0, which sends the result to everyone: the root's link carries 2(n-1) tensors."""
    reduce(wire, tensor, op, root=0)
    broadcast(wire, tensor, root=0)


def _others(wire: Wire, root: int) -> list[int]:
    return [peer for peer in range(wire.size) if peer != root]
