"""Tree broadcast. Write `broadcast` of comm/algorithms/tree.py.

Read notebooks/03_cost_of_a_message.ipynb first. Do not open comm/algorithms/tree.py yet: it has the
solution.

You may use:

    family(wire: Wire, root: int) -> tuple[int | None, list[int]]
        Return this rank's parent (None at the root) and its children, largest subtree first.
    wire.isend(tensor, dst) -> Transfer
        Start to send a contiguous tensor.
    wire.irecv(tensor, src) -> Transfer
        Start to receive into a tensor of the size that is sent.
    transfer.wait()
        Block until the message has arrived, or has left.

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
