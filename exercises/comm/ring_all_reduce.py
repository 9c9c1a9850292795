"""Ring all-reduce. Write `all_reduce` of comm/algorithms/ring.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/ring.py yet: it has the solution.

You may use:

    gather_chunks(wire: Wire, chunks: list[torch.Tensor]) -> None
        Copy chunk r of rank r to all other ranks, for each r, in n-1 steps with n ranks.
    reduce_chunks(wire: Wire, chunks: list[torch.Tensor], op: str) -> None
        Make chunk r on rank r the reduction of all ranks' chunks r, in n-1 steps with n ranks.
    shards_of(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]
        Return the shards of a flat tensor, as views.
    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.

Check it with `python -m exercises check ring_all_reduce`.
"""

import torch

from comm.algorithms.ring import gather_chunks, reduce_chunks
from comm.shards import shards_of
from comm.wire.wire import Wire


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """Replace every rank's `full` by the reduction of all, in 2(n-1) messages of an n-th of it."""
    raise NotImplementedError("`all_reduce` is not written yet.")
