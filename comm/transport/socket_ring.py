"""Run the ring over plain sockets, in one polling loop without threads: the patterns "tcp" and "cma".

      left ──► [receive a piece, add it, queue it] ──► right        on each rank, in one loop

gloo hands every message to gloo's own thread: the caller posts it, sleeps, and is woken when the payload
has arrived. On a few busy cores the wake-ups take longer than the copies. Here the rank itself reads from its
left neighbour and writes to its right one whenever the kernel allows it (sockets.py). The chunks and their
order are those of pipelined_ring.py.

The pattern "cma" is the same ring, with another connection where two neighbours share a machine
(cross_memory.py).

A rank that calls another pattern uses other connections and does not see these headers, so the mistake is
noticed only at the timeout.
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
    """Write this rank's chunk of the reduction of all ranks' `full` to `shard`. `full` does not change."""
    n, r = sockets.size, sockets.rank
    chunks = shards_of(full, n)
    sizes = [chunks[chunk_sent(r, step + 1, n)].numel() for step in range(n - 2)]
    partial = torch.empty(sum(sizes), dtype=full.dtype).split(sizes) if sizes else ()
    _ring(sockets, "reduce_scatter", chunks, [*partial, shard], op, gather=False)


def all_gather(sockets: RingSockets, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write the shards of all ranks, in rank order, to `full`."""
    chunks = shards_of(full, sockets.size)
    if chunks[sockets.rank].data_ptr() != shard.data_ptr():
        chunks[sockets.rank].copy_(shard)
    _ring(sockets, "all_gather", chunks, [], "none", gather=True)


def all_reduce(sockets: RingSockets, full: torch.Tensor, op: str) -> None:
    """Replace `full` by the reduction of all. A segment is all-gathered as soon as it is reduced."""
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
    """Do a reduce-scatter into `sums`, if there are any, and an all-gather, if `gather`."""
    n, r = sockets.size, sockets.rank
    queue: deque[memoryview] = deque()

    def send(segment: torch.Tensor) -> None:
        LEDGER.count(name, sockets.pattern, segment.nbytes, axis=sockets.axis)
        queue.append(_bytes_of(segment))

    # A piece is added as it arrives and stays in the cache. A segment goes on when all its pieces are added.
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
    # One piece arrives at a time and is added at once, so one buffer is enough.
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
    """Return the tensor's memory. (`numpy()` would keep the storage from being freed.)"""
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
