"""All-to-all. Write `all_to_all` of comm/algorithms/pairwise.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/pairwise.py yet: it contains the
solution.

You may use:

    transfer.wait() -> None
        Block until the message has arrived, or has left so that its tensor may be changed.
    wire.irecv(tensor: torch.Tensor, src: int) -> Transfer
        Start to receive into a contiguous tensor of exactly the size and dtype that `src` sends.
    wire.isend(tensor: torch.Tensor, dst: int) -> Transfer
        Start to send a contiguous tensor.
    wire.rank: int
        This rank's number in the group, from 0.
    wire.size: int
        The number of ranks.

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
