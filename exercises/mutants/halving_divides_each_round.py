"""Means are too small with halving-doubling: every round divides by the number of ranks."""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.transport.wire import Wire

TARGET = "comm.algorithms.hypercube.halving_doubling"
KILLER = "tests.comm.test_narrated.test_halving_doubling_equals_one_process"
CAUSE = "divided by their number once too often"


def mutant(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    start, end, distance, kept = 0, len(tensor), wire.size // 2, []
    while distance:
        partner, middle = wire.rank ^ distance, (start + end) // 2
        lower, upper = slice(start, middle), slice(middle, end)
        keep, give = (lower, upper) if wire.rank < partner else (upper, lower)
        theirs = torch.empty_like(tensor[keep])
        arriving, leaving = wire.irecv(theirs, partner), wire.isend(tensor[give], partner)
        arriving.wait()
        leaving.wait()
        combine(op, tensor[keep], theirs, out=tensor[keep])
        divide_if_mean(op, tensor[keep], wire.size)
        kept.append((partner, keep, give))
        start, end, distance = keep.start, keep.stop, distance // 2
    for partner, have, lack in reversed(kept):
        arriving, leaving = wire.irecv(tensor[lack], partner), wire.isend(tensor[have], partner)
        arriving.wait()
        leaving.wait()
