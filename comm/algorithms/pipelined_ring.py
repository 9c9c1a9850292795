"""Ring patterns: every rank sends to its right neighbour and receives from its left one, at the same time.

            chunk 0 of [0 1 2 3] goes round, one hop a step:

      rank 1 ──► rank 2 ──► rank 3 ──► rank 0      reduce-scatter: each rank adds its own, n-1 steps
      rank 0 ──► rank 1 ──► rank 2 ──► rank 3      all-gather: each rank keeps a copy, n-1 steps

All links are busy all the time, so the cost is bandwidth-optimal and hardly grows with the number of
ranks: (n-1)/n of the tensor per phase and rank, 2(n-1)/n for an all-reduce; but 2(n-1) latencies.
Patarasu & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

A chunk travels in segments, and a segment goes on as soon as it has been added: while one is added the
next ones arrive.
"""

from collections.abc import Callable

import torch

from comm.algorithms.reduction import combine, finish
from comm.shards import segments_of, shards_of
from comm.transport.stream import Stream
from comm.transport.wire import Transfer, Wire


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
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    if chunks[r].data_ptr() != shard.data_ptr():
        chunks[r].copy_(shard)
    arriving = _gather_receives(wire, chunks)
    leaving = [wire.isend(segment, (r + 1) % n) for segment in segments_of(chunks[r])] if n > 1 else []
    wire.ready()
    _pass_on(wire, arriving, leaving)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """In place: a reduce-scatter whose finished segments set out on the all-gather at once.

    What the all-gather receives goes where a partial sum may still be leaving from. That is safe: the
    final value of a segment cannot come back before every rank has received, and added to, the partial one.
    """
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    sums = [chunks[chunk_sent(r, step + 1, n)] for step in range(n - 1)]
    arriving: list[list[Transfer]] = []
    leaving: list[Transfer] = []
    _reduce(
        wire,
        chunks,
        sums,
        op,
        when_posted=lambda: arriving.extend(_gather_receives(wire, chunks)),
        when_done=lambda segment: leaving.append(wire.isend(segment, (r + 1) % n)),
    )
    _pass_on(wire, arriving, leaving)


def _reduce(
    wire: Wire,
    chunks: list[torch.Tensor],
    sums: list[torch.Tensor],
    op: str,
    when_posted: Callable[[], None] = lambda: None,
    when_done: Callable[[torch.Tensor], None] = lambda segment: None,
) -> None:
    """The reduce-scatter round. `sums[step]` takes what arrived in that step and this rank's own chunk."""
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    own = [segments_of(chunks[chunk_sent(r, step + 1, n)]) for step in range(n - 1)]
    into = [segments_of(total) for total in sums]
    sizes = [len(segment) for step in own for segment in step]
    arriving = Stream(wire, left, sizes, chunks[0].dtype, when_posted)
    first = segments_of(chunks[chunk_sent(r, 0, n)]) if n > 1 else []
    sent: list[list[Transfer]] = [[] for _ in range(n)]  # in each step
    sent[0] = [wire.isend(segment, right) for segment in first]
    wire.ready()
    flow = [(step, i) for step in range(n - 1) for i in range(len(own[step]))]
    for (step, i), arrived in zip(flow, arriving, strict=True):
        if i == 0:  # not only the step before the last one: steps with an empty chunk do not come by here
            for transfers in sent[:step]:
                _wait_all(transfers)
        combine(op, arrived, own[step][i], out=into[step][i])
        if step < n - 2:
            sent[step + 1].append(wire.isend(into[step][i], right))
        else:
            finish(op, into[step][i], n)
            when_done(into[step][i])
    for transfers in sent:
        _wait_all(transfers)


def _gather_receives(wire: Wire, chunks: list[torch.Tensor]) -> list[list[Transfer]]:
    """Post all receives of an all-gather round: the chunks from the left, nearest owner first."""
    n, r = wire.size, wire.rank
    sources = [(r - 1 - step) % n for step in range(n - 1)]
    return [
        [wire.irecv(segment, (r - 1) % n) for segment in segments_of(chunks[source])] for source in sources
    ]


def _pass_on(wire: Wire, arriving: list[list[Transfer]], leaving: list[Transfer]) -> None:
    """The all-gather round: send on what arrives, but for the last chunk, which has been everywhere."""
    for step, transfers in enumerate(arriving):
        for transfer in transfers:
            transfer.wait()
            if step < wire.size - 2:
                leaving.append(wire.isend(transfer.tensor, (wire.rank + 1) % wire.size))
    _wait_all(leaving)


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
