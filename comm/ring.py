"""Ring patterns: every rank sends to its right neighbour and receives from its left one, at the same time.

            chunk 0 of [0 1 2 3] goes round, one hop a step:

      rank 1 ──► rank 2 ──► rank 3 ──► rank 0      reduce-scatter: each rank adds its own, n-1 steps
      rank 0 ──► rank 1 ──► rank 2 ──► rank 3      all-gather: each rank keeps a copy, n-1 steps

All links are busy all the time, so the cost is bandwidth-optimal and hardly grows with the number of
ranks: (n-1)/n of the tensor per phase and rank, 2(n-1)/n for an all-reduce; but 2(n-1) latencies.
Patarasu & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

A chunk travels in segments, and a segment goes on as soon as it has been added: while one is added the
next one arrives. Receives are posted before sends, for a payload moves only once its receive is posted.
"""

import torch

from comm.reduction import combine, finish
from comm.shards import segments_of, shards_of
from comm.wire import Transfer, Wire


def chunk_sent(rank: int, step: int, n: int) -> int:
    """The chunk that `rank` sends in `step` of a ring reduce-scatter; it ends with chunk `rank` itself.

    Chunk c sets out from rank c+1, so that after n-1 hops it arrives, complete, at rank c.
    """
    return (rank - 1 - step) % n


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """`shard` becomes this rank's part of the reduction of all ranks' `full`; `full` is left alone."""
    _reduce_round(wire, shards_of(full, wire.size), shard, op)


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """`full` becomes all ranks' shards in rank order."""
    chunks = shards_of(full, wire.size)
    if chunks[wire.rank].data_ptr() != shard.data_ptr():
        chunks[wire.rank].copy_(shard)
    _gather_round(wire, chunks)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """In place: reduce-scatter, then all-gather of what each rank has reduced."""
    chunks = shards_of(full, wire.size)
    _reduce_round(wire, chunks, chunks[wire.rank], op)
    _gather_round(wire, chunks)


def _reduce_round(wire: Wire, chunks: list[torch.Tensor], result: torch.Tensor, op: str) -> None:
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    if n == 1:
        result.copy_(chunks[0])
    # A partial sum is sent on from the buffer it arrived in; two buffers take turns.
    longest = max(chunk.numel() for chunk in chunks)
    buffers = [torch.empty(longest, dtype=result.dtype) for _ in range(min(2, n - 1))]
    travelling = segments_of(chunks[chunk_sent(r, 0, n)])
    leaving: list[Transfer] = []
    for step in range(n - 1):
        mine = chunks[chunk_sent(r, step + 1, n)]
        last = step == n - 2
        arriving = [wire.irecv(s, left) for s in segments_of(buffers[step % 2][: mine.numel()])]
        if step == 0:
            leaving = [wire.isend(segment, right) for segment in travelling]
        sent_on: list[Transfer] = []
        for transfer, own, kept in zip(
            arriving, segments_of(mine), segments_of(result if last else mine), strict=True
        ):
            transfer.wait()
            combine(op, transfer.tensor, own, out=kept if last else transfer.tensor)
            if not last:
                sent_on.append(wire.isend(transfer.tensor, right))
        _wait_all(leaving)
        leaving = sent_on
    finish(op, result, n)


def _gather_round(wire: Wire, chunks: list[torch.Tensor]) -> None:
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    arriving = [
        [wire.irecv(segment, left) for segment in segments_of(chunks[(r - 1 - step) % n])]
        for step in range(n - 1)
    ]
    leaving = [wire.isend(segment, right) for segment in segments_of(chunks[r])] if n > 1 else []
    for step, transfers in enumerate(arriving):
        for transfer in transfers:
            transfer.wait()
            if step < n - 2:
                leaving.append(wire.isend(transfer.tensor, right))
    _wait_all(leaving)


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
