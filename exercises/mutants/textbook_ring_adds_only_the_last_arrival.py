"""Sums are right on two ranks and too small on more: a chunk has the contributions of two ranks only."""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.ring import shift
from comm.transport.wire import Wire

TARGET = "comm.algorithms.ring.reduce_chunks"
KILLER = "tests.comm.test_narrated.test_ring_all_reduce_equals_one_process"
CAUSE = "is that sum what the next step sends"


def mutant(wire: Wire, chunks: list[torch.Tensor], op: str) -> None:
    n, r = wire.size, wire.rank
    own = [chunk.clone() for chunk in chunks]
    for step in range(n - 1):
        arrived = torch.empty_like(chunks[(r - 2 - step) % n])
        shift(wire, own[(r - 1 - step) % n], arrived)
        combine(op, arrived, own[(r - 2 - step) % n], out=chunks[(r - 2 - step) % n])
    divide_if_mean(op, chunks[r], n)
