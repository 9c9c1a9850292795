"""Ring reduce-scatter. Write `reduce_chunks` of comm/algorithms/ring.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/ring.py yet: it has the solution.

You may use:

    combine(op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None
        Write a (op) b, elementwise, to `out`, which may be `a` or `b`.
    divide_if_mean(op: str, reduced: torch.Tensor, ranks: int) -> None
        Divide the combined tensors of all ranks by the number of ranks, in place, if `op` is "mean".
    shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None
        Send to rank r+1 and receive from rank r-1, modulo n, both started before either is waited
        for.
    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.

Check it with `python -m exercises check ring_reduce_scatter`.
"""

import torch

from comm.algorithms.reduction import combine, divide_if_mean
from comm.algorithms.ring import shift
from comm.wire.wire import Wire


def reduce_chunks(wire: Wire, chunks: list[torch.Tensor], op: str) -> None:
    """Make chunk r on rank r the reduction of all ranks' chunks r, in n-1 steps with n ranks.

    `op` is "sum", "mean", "max", "min" or "product". Chunk r-1 does not change, and the others become partial
    results. The chunks may be views of one tensor: they are written to, and not replaced in the list.
    """
    raise NotImplementedError("`reduce_chunks` is not written yet.")
