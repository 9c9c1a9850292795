"""Tree broadcast. Write `broadcast` of comm/algorithms/tree.py.

Check it with `python -m exercises check tree_broadcast`.
"""

import torch

from comm.algorithms.tree import _family
from comm.transport.wire import Wire


def broadcast(wire: Wire, tensor: torch.Tensor, root: int) -> None:
    """Copy the root's `tensor` to every rank's, down a binomial tree. An empty tensor is not sent.

    `_family(wire, root)` returns this rank's parent, which is None at the root, and the list of its
    children, the child with the largest subtree first.
    """
    raise NotImplementedError("Tree broadcast is not written yet: `broadcast` has no body.")
