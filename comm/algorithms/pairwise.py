"""Pairwise patterns: each rank has a different part for every other rank, and sends it there directly.

rank 0: [a0 a1 a2]        rank 0: [a0 b0 c0]         The result is a transpose. No two ranks need
rank 1: [b0 b1 b2]   ──►  rank 1: [a1 b1 c1]         the same part and no parts are added up, so
rank 2: [c0 c1 c2]        rank 2: [a2 b2 c2]         each part crosses one link, once.

A rank sends n-1 messages, (n-1)/n of its B bytes: (n-1) alpha + (n-1)/n B beta (cost.py).

A rank that adds up what arrives has its chunk of a reduce-scatter. A rank that sends the same part to all has
done its share of an all-gather. Both send as many bytes as the ring, but no message waits for another one.
The ring's messages go to one neighbour only, which is why it suits networks in which every link is shared by
many pairs.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.segment_receiver import SegmentReceiver
from comm.shards import segments_of, shards_of
from comm.wire.wire import Wire


def all_to_all(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Send part p of `full` to rank p, and receive part p of `output` from it. Sizes count elements."""
    n, r = wire.size, wire.rank
    outgoing, incoming = full.split(in_sizes), output.split(out_sizes)
    # Each rank starts with a different partner. Otherwise all ranks would send to rank 0 first.
    sources = [(r - step) % n for step in range(1, n)]
    targets = [(r + step) % n for step in range(1, n)]
    arriving = [wire.irecv(incoming[peer], peer) for peer in sources]
    leaving = [wire.isend(outgoing[peer], peer) for peer in targets]
    incoming[r].copy_(outgoing[r])
    for transfer in arriving + leaving:
        transfer.wait()


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """Write this rank's chunk of the reduction of all ranks' `full` to `shard`.

    `full` does not change, except where `shard` is the rank's part of it.
    """
    chunks, (sources, targets) = shards_of(full, wire.size), _from_and_to(wire)
    mine, into = segments_of(chunks[wire.rank]), segments_of(shard)
    sizes = [len(segment) for segment in mine]
    arriving = [SegmentReceiver(wire, peer, sizes, full.dtype) for peer in sources]
    leaving = [wire.isend(segment, peer) for peer in targets for segment in segments_of(chunks[peer])]
    if not arriving:
        shard.copy_(full)
    for total, segment, *theirs in zip(into, mine, *arriving, strict=True):
        for other in theirs:
            combine(op, segment, other, out=total)
            segment = total
        divide_if_mean(op, total, wire.size)
    for transfer in leaving:
        transfer.wait()


def reduce(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    """Replace the root's `tensor` by the reduction of all. Each rank reduces its chunk and sends it there."""
    chunks = shards_of(tensor, wire.size)
    shard = torch.empty_like(chunks[wire.rank])
    reduce_scatter(wire, shard, tensor, op)
    if wire.rank == root:
        arriving = [wire.irecv(chunks[peer], peer) for peer in range(wire.size) if peer != root]
        chunks[root].copy_(shard)
        for transfer in arriving:
            transfer.wait()
    else:
        wire.isend(shard, root).wait()


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the shards of all ranks, in rank order, to each rank's `full`."""
    chunks, (sources, targets) = shards_of(full, wire.size), _from_and_to(wire)
    arriving = [wire.irecv(chunks[peer], peer) for peer in sources]
    leaving = [wire.isend(shard, peer) for peer in targets]
    if chunks[wire.rank].data_ptr() != shard.data_ptr():
        chunks[wire.rank].copy_(shard)
    for transfer in arriving + leaving:
        transfer.wait()


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """Replace every rank's `full` by the reduction of all: a reduce-scatter, then an all-gather."""
    mine = shards_of(full, wire.size)[wire.rank]
    reduce_scatter(wire, mine, full, op)
    all_gather(wire, full, mine)


def _from_and_to(wire: Wire) -> tuple[list[int], list[int]]:
    """Return the other ranks, in the orders in which this rank receives from them and sends to them."""
    n, r = wire.size, wire.rank
    return [(r - step) % n for step in range(1, n)], [(r + step) % n for step in range(1, n)]
