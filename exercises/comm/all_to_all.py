"""All-to-all. Write `all_to_all` of comm/algorithms/pairwise.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/pairwise.py yet: it has the solution.

You may use:

    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.
    wire.isend(tensor, dst) -> Transfer
        Start to send a contiguous tensor.
    wire.irecv(tensor, src) -> Transfer
        Start to receive into a tensor of the size that is sent.
    transfer.wait()
        Block until the message has arrived, or has left.

Check it with `python -m exercises check all_to_all`.
"""

import torch

from comm.wire.wire import Wire


def all_to_all(
    wire: Wire, output: torch.Tensor, full: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
) -> None:
    """Send part p of `full` to rank p, and receive part p of `output` from it.

    The parts stand one after the other. `in_sizes[p]` is the number of elements of part p of `full`,
    and `out_sizes[p]` that of part p of `output`. An empty part is not sent.
    """
    raise NotImplementedError("`all_to_all` is not written yet.")
