"""Sending and receiving without a deadlock. Write `shift` of comm/algorithms/ring.py.

Read notebooks/02_collectives.ipynb first. Do not open comm/algorithms/ring.py yet: it has the solution.

You may use:

    wire.rank: int, wire.size: int
        This rank's number, from 0, and the number of ranks.
    wire.isend(tensor, dst) -> Transfer
        Start to send a contiguous tensor.
    wire.irecv(tensor, src) -> Transfer
        Start to receive into a tensor of the size that is sent.
    transfer.wait()
        Block until the message has arrived, or has left.

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
