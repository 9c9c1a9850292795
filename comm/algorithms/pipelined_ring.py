"""The ring with chunks in segments: a segment goes on as soon as it has been added, while others arrive.

      rank 0 sends   a0 a1 a2 a3            the four segments of its first chunk, one behind the other
      rank 1 sends      a0 a1 a2 a3         adds a0 and sends it on while a1 arrives
      rank 2 sends         a0 a1 a2 a3      so no link waits for an addition, but for the first segment's

Bytes are those of the textbook's ring (ring.py), messages as many as there are segments. In an all-reduce
a segment that is complete sets out on the all-gather at once.
"""

from collections.abc import Callable, Sequence

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import segments_of, shards_of
from comm.transport.segment_receiver import SegmentReceiver
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
    arriving = [wire.irecv(segment, (r - 1) % n) for segment in _gathered(wire, chunks)]
    leaving = [wire.isend(segment, (r + 1) % n) for segment in segments_of(chunks[r])] if n > 1 else []
    _pass_on(wire, chunks, arriving, leaving)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """In place: a reduce-scatter whose finished segments set out on the all-gather at once.

    What the all-gather receives goes where a partial sum may still be leaving from. That is safe: the
    final value of a segment cannot come back before every rank has received, and added to, the partial one.
    """
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    sums = [chunks[chunk_sent(r, step + 1, n)] for step in range(n - 1)]
    leaving: list[Transfer] = []

    def send_on(segment: torch.Tensor) -> None:
        leaving.append(wire.isend(segment, (r + 1) % n))

    arriving = _reduce(wire, chunks, sums, op, _gathered(wire, chunks), send_on)
    _pass_on(wire, chunks, arriving, leaving)


def _reduce(
    wire: Wire,
    chunks: list[torch.Tensor],
    sums: list[torch.Tensor],
    op: str,
    then: Sequence[torch.Tensor] = (),
    when_done: Callable[[torch.Tensor], None] = lambda segment: None,
) -> list[Transfer]:
    """The reduce-scatter round. `sums[step]` takes what arrived in that step and this rank's own chunk.

    Returns the receives of what comes from the left neighbour afterwards, into the tensors of `then`.
    """
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    own = [segments_of(chunks[chunk_sent(r, step + 1, n)]) for step in range(n - 1)]
    into = [segments_of(total) for total in sums]
    sizes = [len(segment) for step in own for segment in step]
    arriving = SegmentReceiver(wire, left, sizes, chunks[0].dtype, then)
    first = segments_of(chunks[chunk_sent(r, 0, n)]) if n > 1 else []
    sent: list[list[Transfer]] = [[] for _ in range(n)]  # in each step
    sent[0] = [wire.isend(segment, right) for segment in first]
    flow = [(step, i) for step in range(n - 1) for i in range(len(own[step]))]
    for (step, i), arrived in zip(flow, arriving, strict=True):
        if i == 0:  # not only the step before the last one: steps with an empty chunk do not come by here
            for transfers in sent[:step]:
                _wait_all(transfers)
        combine(op, arrived, own[step][i], out=into[step][i])
        if step < n - 2:
            sent[step + 1].append(wire.isend(into[step][i], right))
        else:
            divide_if_mean(op, into[step][i], n)
            when_done(into[step][i])
    for transfers in sent:
        _wait_all(transfers)
    return arriving.last


def _gathered(wire: Wire, chunks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the segments that an all-gather round brings from the left, the nearest owner's first."""
    n, r = wire.size, wire.rank
    return [segment for step in range(n - 1) for segment in segments_of(chunks[(r - 1 - step) % n])]


def _pass_on(
    wire: Wire, chunks: list[torch.Tensor], arriving: list[Transfer], leaving: list[Transfer]
) -> None:
    """The all-gather round: send on what arrives, but for the last chunk, which has been everywhere."""
    right = (wire.rank + 1) % wire.size
    last = len(arriving) - len(segments_of(chunks[right]))
    for i, transfer in enumerate(arriving):
        transfer.wait()
        if i < last:
            leaving.append(wire.isend(transfer.tensor, right))
    _wait_all(leaving)


def _wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
