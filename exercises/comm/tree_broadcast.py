"""Tree broadcast. Write `broadcast` of comm/algorithms/tree.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/algorithms/tree.py yet: it contains the
solution.

You may use:

    family(wire: Wire, root: int) -> tuple[int | None, list[int]]
        Return this rank's parent (None at the root) and its children, largest subtree first.
    transfer.wait() -> None
        Block until the message has arrived, or has left so that its tensor may be changed.
    wire.irecv(tensor: torch.Tensor, src: int) -> Transfer
        Start to receive into a contiguous tensor of exactly the size and dtype that `src` sends.
    wire.isend(tensor: torch.Tensor, dst: int) -> Transfer
        Start to send a contiguous tensor.

Check it with `python -m exercises check tree_broadcast`.
"""

import torch

from comm.algorithms.tree import family
from comm.wire.wire import Wire


def broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to every rank's, down a binomial tree. An empty tensor is not sent.

    `family(wire, root)` returns this rank's parent, which is None at the root, and the list of its
    children, the child with the largest subtree first.
    """
    raise NotImplementedError("`broadcast` is not written yet.")
