"""A transport of our own: the ring on plain TCP sockets, with one loop that polls and no thread.

      left ──► [receive a piece, add it, queue it] ──► right        each rank, all the time

gloo hands every message to a thread of its own: the caller posts, sleeps, and is woken when the payload has
come. On a few busy cores the wake-ups cost more than the copies. Here the rank itself reads from its
left neighbour and writes to its right one whenever the kernel lets it (sockets.py).

The pattern "cma" is the same ring, with another connection where two neighbours share a machine
(cross_memory.py).

A rank that asks for another pattern is not here and does not see the headers: that mistake ends in a timeout.
"""

import ctypes
from collections import deque

import torch

from comm.algorithms.pipelined_ring import chunk_sent
from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import TCP_SEGMENT_BYTES, segments_of, shards_of
from comm.transport.sockets import RingSockets
from lab.ledger import LEDGER


def reduce_scatter(sockets: RingSockets, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
    """`shard` becomes this rank's part of the reduction of all ranks' `full`; `full` is left alone."""
    n, r = sockets.size, sockets.rank
    chunks = shards_of(full, n)
    sizes = [chunks[chunk_sent(r, step + 1, n)].numel() for step in range(n - 2)]
    partial = torch.empty(sum(sizes), dtype=full.dtype).split(sizes) if sizes else ()
    _ring(sockets, "reduce_scatter", chunks, [*partial, shard], op, gather=False)


def all_gather(sockets: RingSockets, full: torch.Tensor, shard: torch.Tensor) -> None:
    """`full` becomes all ranks' shards in rank order."""
    chunks = shards_of(full, sockets.size)
    if chunks[sockets.rank].data_ptr() != shard.data_ptr():
        chunks[sockets.rank].copy_(shard)
    _ring(sockets, "all_gather", chunks, [], "none", gather=True)


def all_reduce(sockets: RingSockets, full: torch.Tensor, op: str) -> None:
    """In place: a reduce-scatter whose finished segments set out on the all-gather at once."""
    n, r = sockets.size, sockets.rank
    chunks = shards_of(full, n)
    sums = [chunks[chunk_sent(r, step + 1, n)] for step in range(n - 1)]
    _ring(sockets, "all_reduce", chunks, sums, op, gather=True)


def _ring(
    sockets: RingSockets,
    name: str,
    chunks: list[torch.Tensor],
    sums: list[torch.Tensor],
    op: str,
    gather: bool,
) -> None:
    """A reduce-scatter round into `sums`, if there are any, and an all-gather round, if asked for."""
    n, r = sockets.size, sockets.rank
    queue: deque[memoryview] = deque()

    def send(segment: torch.Tensor) -> None:
        LEDGER.count(name, sockets.pattern, segment.nbytes)
        queue.append(_bytes_of(segment))

    # What arrives is added in pieces that stay in the cache; a whole segment of sums goes on.
    adding: list[tuple[torch.Tensor, torch.Tensor, bool, torch.Tensor | None]] = []
    for step, total in enumerate(sums):
        is_last = step == n - 2
        for mine, into in zip(_segments(chunks[chunk_sent(r, step + 1, n)]), _segments(total), strict=True):
            pieces = list(
                zip(
                    segments_of(mine, sockets.piece_bytes),
                    segments_of(into, sockets.piece_bytes),
                    strict=True,
                )
            )
            for i, (own, result) in enumerate(pieces, start=1):
                goes_on = into if i == len(pieces) and (gather or not is_last) else None
                adding.append((own, result, is_last, goes_on))
    sources = [(r - 1 - step) % n for step in range(n - 1)] if gather else []
    copying = [
        (segment, step == n - 2)
        for step, source in enumerate(sources)
        for segment in _segments(chunks[source])
    ]
    # One piece arrives at a time and is added at once, so one buffer serves them all.
    longest = max((len(own) for own, *_ in adding), default=0)
    buffer = torch.empty(longest, dtype=chunks[0].dtype)

    def arrived(position: int) -> None:
        if position < len(adding):
            own, result, is_last, goes_on = adding[position]
            combine(op, buffer[: len(own)], own, out=result)
            if is_last:
                divide_if_mean(op, result, n)
            if goes_on is not None:
                send(goes_on)
        else:
            segment, is_last = copying[position - len(adding)]
            if not is_last:
                send(segment)

    for segment in _segments(chunks[chunk_sent(r, 0, n) if sums else r]):
        send(segment)
    incoming = [_bytes_of(buffer[: len(own)]) for own, *_ in adding]
    sockets.run(queue, incoming + [_bytes_of(segment) for segment, _ in copying], arrived)


def _segments(flat: torch.Tensor) -> list[torch.Tensor]:
    return segments_of(flat, TCP_SEGMENT_BYTES)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """The tensor's memory, while the tensor lives. `numpy()` would keep its storage from being freed."""
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
