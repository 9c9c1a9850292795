"""Ring all-reduce. Write `all_reduce` of comm/algorithms/ring.py.

Check it with `python -m exercises check ring_all_reduce`.
"""

import torch

from comm.algorithms.ring import gather_chunks, reduce_chunks
from comm.shards import shards_of
from comm.transport.wire import Wire


def all_reduce(wire: Wire, full: torch.Tensor, op: str) -> None:
    """Replace every rank's `full` by the reduction of all, in 2(n-1) messages of an n-th of it."""
    raise NotImplementedError("Ring all-reduce is not written yet: `all_reduce` has no body.")
