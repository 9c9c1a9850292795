"""Ring all-gather. Write `gather_chunks` of comm/algorithms/ring.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/ring.py yet: it has the solution.

You may use:

    shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None
        Send to rank r+1 and receive from rank r-1, modulo n, both started before either is waited
        for.
    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.

Check it with `python -m exercises check ring_all_gather`.
"""

import torch

from comm.algorithms.ring import shift
from comm.wire.wire import Wire


def gather_chunks(wire: Wire, chunks: list[torch.Tensor]) -> None:
    """Copy chunk r of rank r to all other ranks, for each r, in n-1 steps with n ranks.

    The chunks may be views of one tensor: they are written to, and not replaced in the list.
    """
    raise NotImplementedError("`gather_chunks` is not written yet.")
