"""Each rank ends with one complete chunk: all other chunks are partial sums that differ by rank."""

import torch

from comm.algorithms.ring import shift
from comm.transport.wire import Wire

TARGET = "comm.algorithms.ring.gather_chunks"
KILLER = "tests.comm.test_narrated.test_ring_all_reduce_equals_one_process"
SYMPTOM = "After an all-reduce the ranks have different results."


def mutant(wire: Wire, chunks: list[torch.Tensor]) -> None:
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        shift(wire, chunks[(r + 1 + step) % n], chunks[(r + step) % n - 1])
