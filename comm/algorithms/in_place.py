"""All-reduce tensors that the ranks share: each rank reduces its chunk in the memory of all ranks.

               tensor of rank 0        tensor of rank 1        tensor of rank 2
      rank 0   A0 + A1 + A2 ──────────► A012 ─────────────────► A012
      rank 1   B012 ◄────────────────── B0 + B1 + B2 ─────────► B012
      rank 2   C012 ◄────────────────── C012 ◄───────────────── C0 + C1 + C2

No tensor is sent. The headers show that all ranks have arrived, so their tensors are complete. Then each rank
reads its chunk of every tensor, and writes the sum to every tensor. At the end the ranks wait for each other
once more: until then others may write to this rank's tensor.

Each byte is read once and written once, in n-1 other tensors each: 2 (alpha + (n-1)/n B beta) for B bytes on
n ranks (cost.py). The tensors come from comm/shared_tensors.py. Ranks of one host have long been reduced so
(Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory collectives", 2008).
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean, divisor_before
from comm.errors import CommError
from comm.shards import segments_of, shards_of
from comm.wire.shared_segment import of_all_ranks
from comm.wire.wire import Wire
from lab.trace.ledger import LEDGER


def all_reduce(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Replace every rank's `tensor` by the reduction of all. Raise CommError if they are not shared."""
    wire.finish_handshake()
    n, r = wire.size, wire.rank
    tensors = of_all_ranks(tensor, wire.group)
    if tensors is None and n > 1 and tensor.numel():
        raise CommError(
            f"{wire.op}: the pattern 'in_place' needs a tensor that all ranks share (shared_tensors.py), "
            "and ranks of one machine that can share memory."
        )
    # A segment of the sum stays in the cache until it is copied to all ranks.
    for pieces in zip(*(segments_of(shards_of(x, n)[r]) for x in tensors or []), strict=True):
        _reduce(pieces[r], [piece for rank, piece in enumerate(pieces) if rank != r], op)
        LEDGER.count(wire.op, wire.pattern, 2 * (n - 1) * pieces[r].nbytes, 2 * (n - 1), axis=wire.axis)
    _wait_for_all(wire)


def _reduce(total: torch.Tensor, others: list[torch.Tensor], op: str) -> None:
    """Combine the tensors of all ranks, and write the result to each of them."""
    ranks = len(others) + 1
    divisor = divisor_before(op, total.dtype, ranks)
    if divisor != 1:
        total.div_(divisor)
    for other in others:
        combine(op, total, other if divisor == 1 else other / divisor, out=total)
    divide_if_mean(op, total, ranks)
    for other in others:
        other.copy_(total)


def _wait_for_all(wire: Wire) -> None:
    """Return when all ranks have called this: a dissemination barrier of L = ceil(log2 n) rounds.

    After round k a rank has heard from 2^(k+1) ranks, directly or through others (Hensgen, Finkel and
    Manber, "Two algorithms for barrier synchronization", 1988).
    """
    n, distance = wire.size, 1
    while distance < n:
        token, arrived = torch.zeros(2, dtype=torch.uint8).split(1)
        leaving = wire.isend(token, (wire.rank + distance) % n, header=True)
        wire.irecv(arrived, (wire.rank - distance) % n, header=True).wait()
        leaving.wait()
        distance *= 2
