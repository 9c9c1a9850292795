"""The ring, as in textbooks: each rank sends to its right neighbour while it receives from its left one.

An all-reduce is a reduce-scatter and then an all-gather. Each rank's tensor is divided into n chunks. Here n
is 3, and the chunks are a, b and c; a1 is rank 1's own chunk a, and a12 is a1 + a2. A rank sends the chunk
with the star. A dot is a partial result that no rank needs any more.

                    rank 0                rank 1                rank 2
      step 0        a0     b0     c0*     a1*    b1     c1      a2     b2*    c2
      step 1        a0     b02*   c0      a1     b1     c01*    a12*   b2     c2
      reduced       a012   .      .       .      b012   .       .      .      c012      after n-1 steps

      step 0        a012*  .      .       .      b012*  .       .      .      c012*
      step 1        a012   .      c012*   a012*  b012   .       .      b012*  c012
      gathered      a012   b012   c012    a012   b012   c012    a012   b012   c012      after n-1 more

Every link is busy in every step. A rank sends 2(n-1) messages of one chunk, so 2(n-1)/n of the tensor. For B
bytes that takes 2(n-1) (alpha + (B/n) beta) seconds (cost.py). No all-reduce sends fewer bytes: Patarasu and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

What this file imports:

    shards_of(full, n)           n views of a flat tensor, of equal size or one element longer
    combine(op, a, b, out=c)     c = a + b, or the maximum, minimum or product
    divide_if_mean(op, x, n)     x /= n if op is "mean"; else nothing
    wire.isend, wire.irecv       start a message to or from a rank; `wait()` returns when it is done

pipelined_ring.py is the same ring with chunks in segments: a rank adds one while others arrive.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import shards_of
from comm.transport.wire import Wire


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """Write this rank's chunk of the reduction of all ranks' `full` to `shard`. `full` does not change."""
    chunks = [chunk.clone() for chunk in shards_of(full, wire.size)]  # partial sums must not go into `full`
    reduce_chunks(wire, chunks, op)
    shard.copy_(chunks[wire.rank])


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the shards of all ranks, in rank order, to every rank's `full`."""
    chunks = shards_of(full, wire.size)
    chunks[wire.rank].copy_(shard)
    gather_chunks(wire, chunks)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """Replace every rank's `full` by the reduction of all: a reduce-scatter, then an all-gather."""
    chunks = shards_of(full, wire.size)
    reduce_chunks(wire, chunks, op)
    gather_chunks(wire, chunks)


def reduce_chunks(wire: Wire, chunks: list[torch.Tensor], op: str) -> None:
    """Reduce chunk r to rank r. The other chunks of a rank end as partial results."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        # The chunk that arrives is the one that the left neighbour, rank r - 1, sends in this step.
        outgoing, mine = chunks[(r - 1 - step) % n], chunks[(r - 2 - step) % n]
        arrived = torch.empty_like(mine)
        shift(wire, outgoing, arrived)
        combine(op, arrived, mine, out=mine)
    divide_if_mean(op, chunks[r], n)


def gather_chunks(wire: Wire, chunks: list[torch.Tensor]) -> None:
    """Copy chunk r of rank r to every rank."""
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        shift(wire, chunks[(r - step) % n], chunks[(r - 1 - step) % n])


def shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the right neighbour and receive from the left one, both started before either is waited for.

    If every rank waited for its send first, no rank would receive. Empty chunks, of a tensor with fewer
    elements than ranks, are not sent; both sides know the sizes.
    """
    arriving = wire.irecv(incoming, (wire.rank - 1) % wire.size) if incoming.numel() else None
    leaving = wire.isend(outgoing, (wire.rank + 1) % wire.size) if outgoing.numel() else None
    for transfer in (arriving, leaving):
        if transfer is not None:
            transfer.wait()
