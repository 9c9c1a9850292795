"""The ring, as in textbooks: each rank sends to its right neighbour while it receives from its left one.

      reduce-scatter, 3 ranks: what each rank holds of the chunks a, b, c; * is what it sends

      rank 0     rank 1     rank 2
      a0 b0 c0*  a1* b1 c1  a2 b2* c2      step 0: each sends the chunk of its left neighbour
      a0 b0+* c0 a1 b1 c1+* a2+* b2 c2     step 1: each sends on what has arrived, with its own added
      a++        b++        c++            after n-1 steps rank r has all contributions to chunk r

      all-gather: the same n-1 steps again, and each rank keeps a copy of what it sends on

Every link is busy in every step, so the time hardly grows with the number of ranks: each rank sends
(n-1)/n of the tensor per phase, 2(n-1)/n for an all-reduce, in 2(n-1) messages. No algorithm sends less.
Patarasu & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

`comm/algorithms/pipelined_ring.py` is the same with chunks in segments: it adds one while others arrive.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import shards_of
from comm.transport.wire import Wire


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """Make `shard` this rank's part of the reduction of all ranks' `full`, which stays as it is."""
    chunks = [chunk.clone() for chunk in shards_of(full, wire.size)]
    reduce_round(wire, chunks, op)
    shard.copy_(chunks[wire.rank])


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Make every rank's `full` all shards in rank order."""
    chunks = shards_of(full, wire.size)
    chunks[wire.rank].copy_(shard)
    gather_round(wire, chunks)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """Make every rank's `full` the reduction of all, in place: a reduce-scatter, then an all-gather."""
    chunks = shards_of(full, wire.size)
    reduce_round(wire, chunks, op)
    gather_round(wire, chunks)


def reduce_round(wire: Wire, chunks: list[torch.Tensor], op: str) -> None:
    """Make `chunks[r]` on rank r the reduction of all ranks'; the other chunks end as partial results."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        outgoing, own = chunks[(r - 1 - step) % n], chunks[(r - 2 - step) % n]
        arrived = torch.empty_like(own)
        exchange(wire, outgoing, arrived)
        combine(op, arrived, own, out=own)
    divide_if_mean(op, chunks[r], n)


def gather_round(wire: Wire, chunks: list[torch.Tensor]) -> None:
    """Make every rank's `chunks` complete; rank r starts with `chunks[r]`."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        exchange(wire, chunks[(r - step) % n], chunks[(r - 1 - step) % n])


def exchange(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the right neighbour and receive from the left one, both at once; empty chunks are not sent."""
    arriving = wire.irecv(incoming, (wire.rank - 1) % wire.size) if incoming.numel() else None
    leaving = wire.isend(outgoing, (wire.rank + 1) % wire.size) if outgoing.numel() else None
    for transfer in (arriving, leaving):
        if transfer is not None:
            transfer.wait()
