"""The ring, as in textbooks: each rank sends to its right neighbour while it receives from its left one.

An all-reduce is a reduce-scatter and then an all-gather. Each rank's tensor is divided into n chunks.
Here n is 3, and the chunks are A, B and C; A1 is rank 1's own chunk A, and A12 is A1 + A2. A row shows
what the ranks hold before the step. A rank sends the chunk with the star. A dot is a chunk that its rank
no longer needs.

                    rank 0                rank 1                rank 2
      step 0        A0     B0     C0*     A1*    B1     C1      A2     B2*    C2
      step 1        A0     B02*   .       .      B1     C01*    A12*   .      C2
      reduced       A012   .      .       .      B012   .       .      .      C012      after n-1 steps

      step 0        A012*  .      .       .      B012*  .       .      .      C012*
      step 1        A012   .      C012*   A012*  B012   .       .      B012*  C012
      gathered      A012   B012   C012    A012   B012   C012    A012   B012   C012      after n-1 more

Every rank sends and receives in every step: 2(n-1) messages of one chunk, so 2(n-1)/n of the tensor. With
a latency of alpha seconds and beta seconds per byte, S bytes take 2(n-1) (alpha + (S/n) beta) seconds
(cost.py). If all ranks send the same amount, no all-reduce sends fewer bytes: Patarasu and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009. All ranks end with the same bits.

What this file imports:

    shards_of(full, n)           n views of a flat tensor, whose sizes differ by at most one element
    combine(op, x, y, out=z)     z = x + y for "sum" and "mean", or the maximum, minimum or product
    divide_if_mean(op, x, n)     x /= n if op is "mean"; else nothing
    wire.isend, wire.irecv       start a message to or from a rank; `wait()` returns when it is done

pipelined_ring.py is the same ring with chunks in segments: a rank adds one segment while others arrive.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import shards_of
from comm.wire.wire import Wire


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """Reduce `full` over all ranks, and write this rank's chunk to `shard`.

    `full` does not change, except where `shard` is the rank's part of it.
    """
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
    """Make chunk r on rank r the reduction of all ranks' chunks r, in n-1 steps with n ranks.

    `op` is "sum", "mean", "max", "min" or "product". Chunk r-1 does not change, and the others become partial
    results. The chunks may be views of one tensor: they are written to, and not replaced in the list.
    """
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        # The chunk that arrives is the one that the left neighbour, rank r - 1, sends in this step.
        outgoing, mine = chunks[(r - 1 - step) % n], chunks[(r - 2 - step) % n]
        arrived = torch.empty_like(mine)
        shift(wire, outgoing, arrived)
        combine(op, arrived, mine, out=mine)
    divide_if_mean(op, chunks[r], n)


def gather_chunks(wire: Wire, chunks: list[torch.Tensor]) -> None:
    """Copy chunk r of rank r to all other ranks, for each r, in n-1 steps with n ranks.

    The chunks may be views of one tensor: they are written to, and not replaced in the list.
    """
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        shift(wire, chunks[(r - step) % n], chunks[(r - 1 - step) % n])


def shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to rank r+1 and receive from rank r-1, modulo n, both started before either is waited for.

    If every rank waited for its send first, no rank would receive. The two tensors may have different sizes.
    An empty tensor (`numel()` is 0) is neither sent nor received; the neighbour knows its size, too.
    """
    arriving = wire.irecv(incoming, (wire.rank - 1) % wire.size) if incoming.numel() else None
    leaving = wire.isend(outgoing, (wire.rank + 1) % wire.size) if outgoing.numel() else None
    for transfer in (arriving, leaving):
        if transfer is not None:
            transfer.wait()
