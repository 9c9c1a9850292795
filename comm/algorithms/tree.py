"""Binomial tree patterns: with each round twice as many ranks have the tensor.

      round 1   0 ────────────► 4                 8 ranks are reached in 3 rounds instead of 7 sends.
      round 2   0 ────► 2       4 ────► 6         ceil(log2 n) latencies, but each rank may have to send
      round 3   0 ► 1   2 ► 3   4 ► 5   6 ► 7     the whole tensor that many times.

Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", 2005.
Positions in the tree are counted from the root, so that any rank can be the root.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.transport.wire import Wire


def broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """Every rank's `tensor` becomes the root's."""
    if tensor.numel() == 0:
        return
    parent, children = _family(wire, root)
    if parent is not None:
        wire.irecv(tensor, parent).wait()
    for child in children:
        # One after the other: side by side they would share the link, and the large subtree start late.
        wire.isend(tensor, child).wait()


def reduce(wire: Wire, tensor: torch.Tensor, op: str, root: int) -> None:
    """The root's `tensor` becomes the reduction of all; the others' stay as they are."""
    if tensor.numel() == 0:
        return
    parent, children = _family(wire, root)
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
    """Reduce to rank 0 up the tree, broadcast down the same tree."""
    reduce(wire, tensor, op, root=0)
    broadcast(wire, tensor, root=0)


def _family(wire: Wire, root: int) -> tuple[int | None, list[int]]:
    """This rank's parent (None at the root) and its children, the one with the largest subtree first."""
    position = (wire.rank - root) % wire.size
    reach = position & -position if position else 1 << (wire.size - 1).bit_length()
    parent = (position - reach + root) % wire.size if position else None
    children = []
    while reach > 1:
        reach //= 2
        if position + reach < wire.size:
            children.append((position + reach + root) % wire.size)
    return parent, children
