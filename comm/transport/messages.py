"""Start point-to-point messages. With gloo a tensor on a GPU goes by host memory; a link may be simulated.

transfer = isend(tensor, dst)          transfer = irecv(tensor, src)
transfer.wait()                        transfer.wait()
"""

import torch

from comm.transport import slow_link
from comm.transport.staging import goes_by_host
from comm.transport.wire import Group, Transfer, peer_wire
from comm.transport.work_queue import queue_of


class SlowTransfer:
    """A message on a simulated slow link, with a second one that tells when it arrives (slow_link.py)."""

    def __init__(self, payload: Transfer, arrival: Transfer, is_received: bool) -> None:
        self._payload, self._arrival, self._is_received = payload, arrival, is_received

    def wait(self) -> None:
        """Block as `Transfer.wait` does. A receiver also waits for the simulated link."""
        self._payload.wait()
        self._arrival.wait()
        if self._is_received:
            slow_link.wait_for_arrival(int(self._arrival.tensor), self._payload.tensor.nbytes)


def isend(tensor: torch.Tensor, dst: int, group: Group = None) -> Transfer | SlowTransfer:
    """Start to send a contiguous tensor to rank `dst` of the group. Call `wait()` before you change it.

    With gloo a tensor on a GPU is copied to host memory first, so the call waits until it is computed.
    """
    outgoing = tensor.detach().to("cpu") if goes_by_host(tensor, group) else tensor.detach()
    payload = peer_wire(group).isend(outgoing, dst)
    if slow_link.current() is None:
        return payload
    if outgoing.is_cuda:
        torch.cuda.current_stream().synchronize()  # the link starts when the tensor is computed
    at = torch.tensor([slow_link.arrival(queue_of(group), tensor.nbytes)], device=outgoing.device)
    return SlowTransfer(payload, peer_wire(group, counted=False).isend(at, dst), is_received=False)


def irecv(tensor: torch.Tensor, src: int, group: Group = None) -> Transfer | SlowTransfer:
    """Start to receive from rank `src` into a contiguous tensor of the size and dtype that `src` sends.

    The k-th receive from a rank gets its k-th send. Sizes are not compared, so both ranks must know them.
    """
    incoming, is_staged = tensor.detach(), goes_by_host(tensor, group)
    if is_staged:
        incoming = torch.empty(tensor.shape, dtype=tensor.dtype)
    payload = peer_wire(group).irecv(incoming, src)
    payload.copy_to = tensor.detach() if is_staged else None
    if slow_link.current() is None:
        return payload
    at = torch.empty(1, dtype=torch.int64, device=incoming.device)
    return SlowTransfer(payload, peer_wire(group, counted=False).irecv(at, src), is_received=True)
