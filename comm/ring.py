"""Ring patterns: every rank sends to its right neighbour and receives from its left one, at the same time.

            chunk 0 of [0 1 2 3] goes round, one hop a step:

      rank 1 ──► rank 2 ──► rank 3 ──► rank 0      reduce-scatter: each rank adds its own, n-1 steps
      rank 0 ──► rank 1 ──► rank 2 ──► rank 3      all-gather: each rank keeps a copy, n-1 steps

All links are busy all the time, so the cost is bandwidth-optimal and hardly grows with the number of
ranks: (n-1)/n of the tensor per phase and rank, 2(n-1)/n for an all-reduce; but 2(n-1) latencies.
Patarasu & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

A chunk travels in segments, and a segment goes on as soon as it has been added: while one is added the
next ones arrive. Receives are posted ahead, for a payload moves only once its receive is posted, but
only a few, so that the memory they arrive in stays small and in the cache.
"""

from collections.abc import Callable

import torch

from comm.reduction import combine, finish
from comm.shards import SEGMENT_BYTES, segments_of, shards_of
from comm.wire import Transfer, Wire

RECEIVES_AHEAD = 4


def chunk_sent(rank: int, step: int, n: int) -> int:
    """The chunk that `rank` sends in `step` of a ring reduce-scatter; it ends with chunk `rank` itself.

    Chunk c sets out from rank c+1, so that after n-1 hops it arrives, complete, at rank c.
    """
    return (rank - 1 - step) % n


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """`shard` becomes this rank's part of the reduction of all ranks' `full`; `full` is left alone."""
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    # Partial sums on their way: `full` is not ours to write to. One step's are gone before the next but one.
    longest = max(chunk.numel() for chunk in chunks)
    spare = [torch.empty(longest if n > 2 else 0, dtype=full.dtype) for _ in range(2)]
    partial = [spare[step % 2][: chunks[chunk_sent(r, step + 1, n)].numel()] for step in range(n - 2)]
    if n == 1:
        shard.copy_(full)
    _reduce(wire, chunks, [*partial, shard], op)


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """`full` becomes all ranks' shards in rank order."""
    chunks = shards_of(full, wire.size)
    if chunks[wire.rank].data_ptr() != shard.data_ptr():
        chunks[wire.rank].copy_(shard)
    right = (wire.rank + 1) % wire.size
    leaving = (
        [wire.isend(segment, right) for segment in segments_of(chunks[wire.rank])] if wire.size > 1 else []
    )
    _gather(wire, chunks, leaving)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """In place: a reduce-scatter whose finished segments set out on the all-gather at once."""
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    leaving: list[Transfer] = []
    sums = [chunks[chunk_sent(r, step + 1, n)] for step in range(n - 1)]
    _reduce(wire, chunks, sums, op, lambda done: leaving.append(wire.isend(done, (r + 1) % n)))
    _gather(wire, chunks, leaving)


def _reduce(
    wire: Wire,
    chunks: list[torch.Tensor],
    sums: list[torch.Tensor],
    op: str,
    when_done: Callable[[torch.Tensor], None] = lambda segment: None,
) -> None:
    """The reduce-scatter round. `sums[step]` takes what arrived in that step and this rank's own chunk."""
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    leaving = (
        [wire.isend(segment, right) for segment in segments_of(chunks[chunk_sent(r, 0, n)])] if n > 1 else []
    )
    own = [segments_of(chunks[chunk_sent(r, step + 1, n)]) for step in range(n - 1)]
    into = [segments_of(total) for total in sums]
    flow = [(step, i) for step in range(n - 1) for i in range(len(own[step]))]
    slots = torch.empty(RECEIVES_AHEAD, SEGMENT_BYTES // chunks[0].element_size(), dtype=chunks[0].dtype)
    arriving: list[Transfer] = []
    sent_on: list[list[Transfer]] = [leaving, *([] for _ in range(n - 1))]
    for position, (step, i) in enumerate(flow):
        for step_ahead, i_ahead in flow[len(arriving) : position + RECEIVES_AHEAD]:
            slot = slots[len(arriving) % RECEIVES_AHEAD][: own[step_ahead][i_ahead].numel()]
            arriving.append(wire.irecv(slot, left))
        if i == 0:  # not only the step before the last one: steps with an empty chunk do not come by here
            for transfers in sent_on[:step]:
                _wait_all(transfers)
        transfer = arriving[position]
        transfer.wait()
        combine(op, transfer.tensor, own[step][i], out=into[step][i])
        if step < n - 2:
            sent_on[step + 1].append(wire.isend(into[step][i], right))
        else:
            finish(op, into[step][i], n)
            when_done(into[step][i])
    for transfers in sent_on:
        _wait_all(transfers)


def _gather(wire: Wire, chunks: list[torch.Tensor], leaving: list[Transfer]) -> None:
    """The all-gather round; this rank's own chunk is `leaving` already."""
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    sources = [(r - 1 - step) % n for step in range(n - 1)]
    arriving = [[wire.irecv(segment, left) for segment in segments_of(chunks[source])] for source in sources]
    for step, transfers in enumerate(arriving):
        for transfer in transfers:
            transfer.wait()
            if step < n - 2:
                leaving.append(wire.isend(transfer.tensor, right))
    _wait_all(leaving)


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
