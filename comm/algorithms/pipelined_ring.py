"""The ring of ring.py with chunks in segments: a rank sends a segment on while it receives the next one.

      rank 0 sends   a0 a1 a2 a3            the four segments of its first chunk
      rank 1 sends      a0 a1 a2 a3         adds its own to a0, and sends the sum on while a1 arrives
      rank 2 sends         a0 a1 a2 a3      so a link waits for the addition of one segment, not of a chunk

It sends as many bytes as ring.py, in more messages: one for each segment (comm.shards.SEGMENT_BYTES). In an
all-reduce a complete segment starts on the all-gather at once, while other segments are still being reduced.
"""

from collections.abc import Callable, Sequence

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.segment_receiver import SegmentReceiver
from comm.shards import segments_of, shards_of
from comm.wire.wire import Transfer, Wire


def chunk_sent(rank: int, step: int, n: int) -> int:
    """Return the number of the chunk that `rank` sends in `step` of a ring reduce-scatter.

    Chunk c starts at rank c+1, so after n-1 steps it arrives, complete, at rank c.
    """
    return (rank - 1 - step) % n


def reduce_scatter(wire: Wire, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """Write this rank's chunk of the reduction of all ranks' `full` to `shard`.

    `full` does not change, except where `shard` is the rank's part of it.
    """
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    # `full` must not change, so partial sums need buffers. Two are enough: a step's sums have left two steps
    # later.
    longest = max(chunk.numel() for chunk in chunks)
    spare = [torch.empty(longest if n > 2 else 0, dtype=full.dtype) for _ in range(2)]
    partial = [spare[step % 2][: chunks[chunk_sent(r, step + 1, n)].numel()] for step in range(n - 2)]
    if n == 1:
        shard.copy_(full)
    _reduce(wire, chunks, [*partial, shard], op)


def all_gather(wire: Wire, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the shards of all ranks, in rank order, to `full`."""
    n, r = wire.size, wire.rank
    chunks = shards_of(full, n)
    if chunks[r].data_ptr() != shard.data_ptr():
        chunks[r].copy_(shard)
    arriving = [wire.irecv(segment, (r - 1) % n) for segment in _gathered(wire, chunks)]
    leaving = [wire.isend(segment, (r + 1) % n) for segment in segments_of(chunks[r])] if n > 1 else []
    _pass_on(wire, chunks, arriving, leaving)


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """Replace `full` by the reduction of all: a reduce-scatter whose results start on the all-gather at once.

    The all-gather receives into memory from which a partial sum may still be leaving. That is safe: the final
    value of a segment arrives only after every rank has received the partial one.
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
    """Do a reduce-scatter. `sums[step]` gets the sum of the chunk that arrives in that step and our own.

    Return the receives that follow from the left neighbour, into the tensors of `then`.
    """
    n, r = wire.size, wire.rank
    left, right = (r - 1) % n, (r + 1) % n
    own = [segments_of(chunks[chunk_sent(r, step + 1, n)]) for step in range(n - 1)]
    into = [segments_of(total) for total in sums]
    sizes = [len(segment) for step in own for segment in step]
    arriving = SegmentReceiver(wire, left, sizes, chunks[0].dtype, then)
    first = segments_of(chunks[chunk_sent(r, 0, n)]) if n > 1 else []
    sent: list[list[Transfer]] = [[] for _ in range(n)]  # by step
    sent[0] = [wire.isend(segment, right) for segment in first]
    flow = [(step, i) for step in range(n - 1) for i in range(len(own[step]))]
    for (step, i), arrived in zip(flow, arriving, strict=True):
        if i == 0:  # wait for all earlier steps: one whose chunk was empty has not waited for those before it
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
    """Return the segments that an all-gather receives from the left, those of the nearest owner first."""
    n, r = wire.size, wire.rank
    return [segment for step in range(n - 1) for segment in segments_of(chunks[(r - 1 - step) % n])]


def _pass_on(
    wire: Wire, chunks: list[torch.Tensor], arriving: list[Transfer], leaving: list[Transfer]
) -> None:
    """Do an all-gather: send on what arrives, except the last chunk, which every rank then has."""
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
