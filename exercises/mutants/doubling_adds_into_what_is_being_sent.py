"""Ranks end with different sums: a rank adds into a segment that its partner has not read yet."""

import torch

from comm.algorithms.hypercube import _fold_in, _fold_out
from comm.algorithms.reduction import combine, divide_if_mean
from comm.shards import segments_of
from comm.transport.segment_receiver import SegmentReceiver
from comm.transport.wire import Wire

TARGET = "comm.algorithms.hypercube.recursive_doubling"
KILLER = "tests.comm.test_delayed_messages.test_an_all_reduce_does_not_change_what_is_still_being_sent"
CAUSE = "belongs to the transport until"
SYMPTOM = "Once in many runs the ranks end an all-reduce with different sums."


def mutant(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    n = _fold_in(wire, tensor, op)
    if wire.rank < n:
        mine = segments_of(tensor)
        distance = 1
        while distance < n:
            partner = wire.rank ^ distance
            arriving = SegmentReceiver(wire, partner, [len(segment) for segment in mine], tensor.dtype)
            for segment in mine:
                wire.isend(segment, partner)
            for segment, theirs in zip(mine, arriving, strict=True):
                lower, upper = (segment, theirs) if wire.rank < partner else (theirs, segment)
                combine(op, lower, upper, out=segment)
            distance *= 2
        divide_if_mean(op, tensor, wire.size)
    _fold_out(wire, tensor, n)
