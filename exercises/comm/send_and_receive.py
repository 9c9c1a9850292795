"""Sending and receiving without a deadlock. Write `shift` of comm/algorithms/ring.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/ring.py yet: it contains the
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

Check it with `python -m exercises check send_and_receive`.
"""

import torch

from comm.wire.wire import Wire


def shift(wire: Wire, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to rank r+1 and receive from rank r-1, modulo n, both started before either is waited for.

    If every rank waited for its send first, no rank would receive. The two tensors may have different sizes.
    One may be empty (`numel()` is 0): then it is not sent, and its receiver knows that, too.
    """
    raise NotImplementedError("`shift` is not written yet.")
