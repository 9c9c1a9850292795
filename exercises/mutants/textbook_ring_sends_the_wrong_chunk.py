"""Ranks end with different results: partial sums are passed on, and overwrite the complete chunks."""

import torch

from comm.algorithms.ring import shift
from comm.transport.wire import Wire

TARGET = "comm.algorithms.ring.gather_chunks"
KILLER = "tests.comm.test_narrated.test_ring_all_reduce_equals_one_process"
CAUSE = "begin with the one that it has completed"
SYMPTOM = "After an all-reduce the ranks have different results."


def mutant(wire: Wire, chunks: list[torch.Tensor]) -> None:
    n, r = wire.size, wire.rank
    for step in range(n - 1):
        shift(wire, chunks[(r + 1 + step) % n], chunks[(r + step) % n - 1])
