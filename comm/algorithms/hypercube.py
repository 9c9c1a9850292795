"""Hypercube patterns: in each round a rank exchanges data with a partner whose number differs in one bit.

      recursive doubling                     halving-doubling
      round 1   0 ◄─► 1   2 ◄─► 3            round 1   0 ◄─► 2   1 ◄─► 3    half of the tensor
      round 2   0 ◄─► 2   1 ◄─► 3            round 2   0 ◄─► 1   2 ◄─► 3    a quarter
                                             round 3   0 ◄─► 1   2 ◄─► 3    a quarter, reduced
                                             round 4   0 ◄─► 2   1 ◄─► 3    half, reduced

Recursive doubling: partners exchange full tensors and add them. After log2 n rounds every rank has the sum.
For B bytes that takes log2 n (alpha + B beta) seconds (cost.py). No rank sends more than one message in a
round, and with that no pattern needs fewer rounds.

Halving-doubling: partners exchange halves, each reduces the half that it keeps, and the next round divides
that half. Then the same exchanges in reverse order gather the results. It sends as few bytes as the ring, in
2 log2 n messages (Rabenseifner, "Optimization of collective reduction operations", 2004).

If n is not a power of two and p is the largest one below it, each rank r >= p first sends its tensor to rank
r - p, and receives the result from there at the end. A full tensor travels in segments, so that a rank adds
one segment while the next arrives. Partners combine the same two values in the same order, so all ranks end
bitwise equal: the order matters for the maximum of 0.0 and -0.0.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.segment_receiver import SegmentReceiver
from comm.shards import segments_of
from comm.wire.wire import Wire


def recursive_doubling(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """All-reduce in place: exchange full tensors with log2 n partners."""
    n = _fold_in(wire, tensor, op)
    if wire.rank < n:
        mine = segments_of(tensor)
        distance = 1
        while distance < n:
            partner = wire.rank ^ distance
            arriving = SegmentReceiver(wire, partner, [len(segment) for segment in mine], tensor.dtype)
            leaving = [wire.isend(segment, partner) for segment in mine]
            for segment, sent, theirs in zip(mine, leaving, arriving, strict=True):
                sent.wait()
                lower, upper = (segment, theirs) if wire.rank < partner else (theirs, segment)
                combine(op, lower, upper, out=segment)
            distance *= 2
        divide_if_mean(op, tensor, wire.size)
    _fold_out(wire, tensor, n)


def halving_doubling(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """All-reduce in place: exchange and reduce smaller and smaller parts, then gather them."""
    n = _fold_in(wire, tensor, op)
    if wire.rank < n:
        start, end = 0, tensor.numel()
        theirs = torch.empty_like(tensor[: (end + 1) // 2])
        way_back: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
        distance = n // 2
        while distance:
            partner = wire.rank ^ distance
            middle = (start + end + 1) // 2
            lower, upper = (start, middle), (middle, end)
            keep, give = (lower, upper) if wire.rank < partner else (upper, lower)
            mine = tensor[slice(*keep)]
            arrived = theirs[: mine.numel()]
            _swap(wire, tensor[slice(*give)], arrived, partner)
            combine(op, mine, arrived, out=mine)
            way_back.append((partner, keep, give))
            start, end = keep
            distance //= 2
        divide_if_mean(op, tensor[start:end], wire.size)
        for partner, have, lack in reversed(way_back):
            _swap(wire, tensor[slice(*have)], tensor[slice(*lack)], partner)
    _fold_out(wire, tensor, n)


def _swap(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> None:
    """Send a tensor to a partner and receive another one from it, at the same time."""
    arriving = wire.irecv(incoming, partner) if incoming.numel() else None
    leaving = wire.isend(outgoing, partner) if outgoing.numel() else None
    for transfer in (arriving, leaving):
        if transfer is not None:
            transfer.wait()


def _fold_in(wire: Wire, tensor: torch.Tensor, op: str) -> int:
    """Combine each tensor of ranks r >= p with that of rank r - p. Return p, the largest power of two."""
    n = 1 << (wire.size.bit_length() - 1)
    mine = segments_of(tensor)
    if wire.rank >= n:
        leaving = [wire.isend(segment, wire.rank - n) for segment in mine]
        for transfer in leaving:
            transfer.wait()
    elif wire.rank + n < wire.size:
        arriving = SegmentReceiver(wire, wire.rank + n, [len(segment) for segment in mine], tensor.dtype)
        for segment, theirs in zip(mine, arriving, strict=True):
            combine(op, segment, theirs, out=segment)
    return n


def _fold_out(wire: Wire, tensor: torch.Tensor, n: int) -> None:
    """Send the result to the ranks r >= n, from rank r - n. `n` is what `_fold_in` returned."""
    transfers = []
    if wire.rank >= n:
        transfers = [wire.irecv(segment, wire.rank - n) for segment in segments_of(tensor)]
    elif wire.rank + n < wire.size:
        transfers = [wire.isend(segment, wire.rank + n) for segment in segments_of(tensor)]
    for transfer in transfers:
        transfer.wait()
