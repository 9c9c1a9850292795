"""Binomial tree patterns: in each round the number of ranks that have the tensor doubles.

      round 1   0 ────────────► 4                 A broadcast reaches 8 ranks in 3 rounds.
      round 2   0 ────► 2       4 ────► 6         It takes L (alpha + B beta) for B bytes, with
      round 3   0 ► 1   2 ► 3   4 ► 5   6 ► 7     L = ceil(log2 n) rounds (cost.py).

A reduce takes the same tree in the other direction, round 3 first. The full tensor travels in every round, so
for large tensors a ring is faster.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
Positions in the tree count from the root, so any rank can be the root.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.wire.wire import Wire


def broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to every rank's."""
    if tensor.numel() == 0:
        return
    parent, children = family(wire, root)
    if parent is not None:
        wire.irecv(tensor, parent).wait()
    for child in children:
        # One at a time: two messages would share the link, and the largest subtree would start late.
        wire.isend(tensor, child).wait()


def reduce(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    """Replace the root's `tensor` by the reduction of all. The other ranks' tensors do not change."""
    if tensor.numel() == 0:
        return
    parent, children = family(wire, root)
    if parent is not None and children:
        tensor = tensor.clone()
    # The smallest subtree is ready first.
    for transfer in [wire.irecv(torch.empty_like(tensor), child) for child in reversed(children)]:
        transfer.wait()
        combine(op, tensor, transfer.tensor, out=tensor)
    if parent is not None:
        wire.isend(tensor, parent).wait()
    else:
        divide_if_mean(op, tensor, wire.size)


def all_reduce(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """Reduce up the tree to rank 0, then broadcast the result down the same tree."""
    reduce(wire, tensor, op, root=0)
    broadcast(wire, tensor, root=0)


def family(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    """Return this rank's parent (None at the root) and its children, largest subtree first."""
    position = (wire.rank - root) % wire.size
    reach = position & -position if position else 1 << (wire.size - 1).bit_length()
    parent = (position - reach + root) % wire.size if position else None
    children = []
    while reach > 1:
        reach //= 2
        if position + reach < wire.size:
            children.append((position + reach + root) % wire.size)
    return parent, children
