"""A reduce to rank 0 overwrites the tensors of the other ranks with partial sums."""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.tree import family
from comm.transport.wire import Wire

TARGET = "comm.algorithms.tree.reduce"
KILLER = "tests.comm.test_collectives_by_hand.test_a_reduce_does_not_change_the_other_ranks_tensors"
CAUSE = "a tensor of the caller written to"


def mutant(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    if tensor.numel() == 0:
        return
    parent, children = family(wire, root)
    for transfer in [wire.irecv(torch.empty_like(tensor), child) for child in reversed(children)]:
        transfer.wait()
        combine(op, tensor, transfer.tensor, out=tensor)
    if parent is not None:
        wire.isend(tensor, parent).wait()
    else:
        divide_if_mean(op, tensor, wire.size)
