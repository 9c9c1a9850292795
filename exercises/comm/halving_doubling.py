"""All-reduce by halving and doubling. Write `halving_doubling` of comm/algorithms/hypercube.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/algorithms/hypercube.py yet: it has the
solution.

You may use:

    _fold_in(wire: Wire, tensor: torch.Tensor, op: str) -> int
        Combine each tensor of ranks r >= p with that of rank r - p.
    _fold_out(wire: Wire, tensor: torch.Tensor, n: int) -> None
        Send the result to the ranks r >= n, from rank r - n.
    _swap(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> None
        Send a tensor to a partner and receive another one from it, at the same time.
    combine(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None
        Write a (op) b, elementwise, to `out`, which may be `a` or `b`.
    divide_if_mean(op: str, reduced: torch.Tensor, ranks: int) -> None
        Divide the combined tensors of all ranks by the number of ranks, in place, if `op` is "mean".
    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.

Check it with `python -m exercises check halving_doubling`.
"""

import torch

from comm.algorithms.hypercube import _fold_in, _fold_out, _swap
from comm.algorithms.reduction import combine, divide_if_mean
from comm.wire.wire import Wire


def halving_doubling(wire: Wire, tensor: torch.Tensor, op: str) -> None:
    """All-reduce in place: exchange and reduce smaller and smaller parts, then gather them.

    `_fold_in` and `_fold_out` do what is needed where the number of ranks is no power of two: between
    the two calls only the ranks below `n`, which `_fold_in` returns, take part. `_swap` sends one
    tensor to a partner and receives another one from it. Of two partners the lower rank keeps the
    first half, and each combines its own part with the other's in the same order on both.
    """
    raise NotImplementedError("`halving_doubling` is not written yet.")
