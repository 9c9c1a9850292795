"""Four ranks end with twice the sum of two: each rank has the same partner in all rounds of the doubling."""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.transport.wire import Wire

TARGET = "comm.algorithms.hypercube.recursive_doubling"
KILLER = "tests.comm.test_narrated.test_recursive_doubling_equals_one_process"
CAUSE = "another partner"
SYMPTOM = "Four ranks end with twice the sum of two."


def mutant(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    for _ in range(wire.size.bit_length() - 1):
        partner, theirs = wire.rank ^ 1, torch.empty_like(tensor)
        arriving, leaving = wire.irecv(theirs, partner), wire.isend(tensor, partner)
        arriving.wait()
        leaving.wait()
        combine(op, tensor, theirs, out=tensor)
    divide_if_mean(op, tensor, wire.size)
