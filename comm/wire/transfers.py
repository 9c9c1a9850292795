"""Start point-to-point messages, over streams (streams.py), gloo or nccl.

transfer = isend(tensor, dst)          transfer = irecv(tensor, src)
transfer.wait()                        transfer.wait()
"""

import torch
import torch.distributed as dist

from comm.wire import slow_link
from comm.wire.gloo_wire import peer_wire
from comm.wire.groups import Group, group_of
from comm.wire.staging import goes_by_host
from comm.wire.stream_wire import MessageWire
from comm.wire.transport import chosen_transport
from comm.wire.wire import Transfer, Wire
from comm.wire.work_queue import queue_of


class StagedTransfer:
    """A message that arrives in host memory, for a tensor on a GPU."""

    def __init__(self, transfer: Transfer, place: torch.Tensor) -> None:
        self._transfer, self.tensor = transfer, transfer.tensor
        self._place: torch.Tensor | None = place

    def wait(self) -> None:
        self._transfer.wait()
        place, self._place = self._place, None
        if place is not None:
            place.copy_(self.tensor)


class SlowTransfer:
    """A message on a simulated slow link, with a second one that tells when it arrives (slow_link.py)."""

    def __init__(self, payload: Transfer | StagedTransfer, arrival: Transfer, is_received: bool) -> None:
        self._payload, self._arrival, self._is_received = payload, arrival, is_received

    def wait(self) -> None:
        """Block as `Transfer.wait` does. A receiver also waits for the simulated link."""
        self._payload.wait()
        self._arrival.wait()
        if self._is_received:
            slow_link.wait_for_arrival(int(self._arrival.tensor), self._payload.tensor.nbytes)


AnyTransfer = Transfer | StagedTransfer | SlowTransfer


def isend(tensor: torch.Tensor, dst: int, group: Group = None) -> AnyTransfer:
    """Start to send a contiguous tensor to rank `dst` of the group. Call `wait()` before you change it.

    With gloo a tensor on a GPU is copied to host memory first, so the call waits until it is computed.
    """
    outgoing = tensor.detach().to("cpu") if goes_by_host(tensor, group) else tensor.detach()
    payload = _wire(group).isend(outgoing, dst)
    if slow_link.current() is None:
        return payload
    if outgoing.is_cuda:
        torch.cuda.current_stream().synchronize()  # the link starts when the tensor is computed
    at = torch.tensor([slow_link.arrival(queue_of(group), tensor.nbytes)], device=outgoing.device)
    return SlowTransfer(payload, _wire(group, counted=False).isend(at, dst), is_received=False)


def irecv(tensor: torch.Tensor, src: int, group: Group = None) -> AnyTransfer:
    """Start to receive from rank `src` into a contiguous tensor of the size and dtype that `src` sends.

    The k-th receive from a rank gets its k-th send. Both ranks must know the size. A wrong size is a
    CommError, but gloo does not compare sizes, and dtypes are never compared.
    """
    incoming, is_staged = tensor.detach(), goes_by_host(tensor, group)
    if is_staged:
        incoming = torch.empty(tensor.shape, dtype=tensor.dtype)
    arriving = _wire(group).irecv(incoming, src)
    payload = StagedTransfer(arriving, tensor.detach()) if is_staged else arriving
    if slow_link.current() is None:
        return payload
    at = torch.empty(1, dtype=torch.int64, device=incoming.device)
    return SlowTransfer(payload, _wire(group, counted=False).irecv(at, src), is_received=True)


def _wire(group: Group, counted: bool = True) -> Wire:
    members, transport = group_of(group), chosen_transport()
    if transport == "gloo" or dist.get_backend(members) != "gloo" or members.size() == 1:
        return peer_wire(members, counted)
    return MessageWire(members, transport, counted)
