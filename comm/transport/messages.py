"""Start point-to-point messages, over streams (streams.py), gloo or nccl.

transfer = isend(tensor, dst)          transfer = irecv(tensor, src)
transfer.wait()                        transfer.wait()
"""

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.transport.choice import chosen_transport
from comm.transport.stream_wire import StreamTransfer
from comm.transport.streams import message_streams_of
from comm.wire import slow_link
from comm.wire.staging import goes_by_host
from comm.wire.wire import POINT_TO_POINT, Group, Transfer, Wire, bytes_of, check_peer, group_of, peer_wire
from comm.wire.work_queue import queue_of
from lab.trace.ledger import LEDGER


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


AnyTransfer = Transfer | SlowTransfer


def isend(tensor: torch.Tensor, dst: int, group: Group = None) -> AnyTransfer:
    """Start to send a contiguous tensor to rank `dst` of the group. Call `wait()` before you change it.

    With gloo a tensor on a GPU is copied to host memory first, so the call waits until it is computed.
    """
    outgoing = tensor.detach().to("cpu") if goes_by_host(tensor, group) else tensor.detach()
    payload = _start(outgoing, dst, "send to", group)
    if slow_link.current() is None:
        return payload
    if outgoing.is_cuda:
        torch.cuda.current_stream().synchronize()  # the link starts when the tensor is computed
    at = torch.tensor([slow_link.arrival(queue_of(group), tensor.nbytes)], device=outgoing.device)
    return SlowTransfer(payload, _start(at, dst, "send to", group, counted=False), is_received=False)


def irecv(tensor: torch.Tensor, src: int, group: Group = None) -> AnyTransfer:
    """Start to receive from rank `src` into a contiguous tensor of the size and dtype that `src` sends.

    The k-th receive from a rank gets its k-th send. Both ranks must know the size. A wrong size is a
    CommError, but gloo does not compare sizes, and dtypes are never compared.
    """
    incoming, is_staged = tensor.detach(), goes_by_host(tensor, group)
    if is_staged:
        incoming = torch.empty(tensor.shape, dtype=tensor.dtype)
    payload = _start(incoming, src, "receive from", group)
    payload.copy_to = tensor.detach() if is_staged else None
    if slow_link.current() is None:
        return payload
    at = torch.empty(1, dtype=torch.int64, device=incoming.device)
    return SlowTransfer(payload, _start(at, src, "receive from", group, counted=False), is_received=True)


def _start(tensor: torch.Tensor, peer: int, verb: str, group: Group, counted: bool = True) -> Transfer:
    members, transport = group_of(group), chosen_transport()
    if transport == "gloo" or dist.get_backend(members) != "gloo" or members.size() == 1:
        wire = peer_wire(members, counted)
        return wire.isend(tensor, peer) if verb == "send to" else wire.irecv(tensor, peer)
    wire = Wire(members, POINT_TO_POINT, "direct")
    check_peer(wire.op, wire.pattern, wire.rank, wire.size, peer, verb)
    if not tensor.is_contiguous():
        raise CommError(f"{wire.op}: call contiguous() on the tensor to {verb} a rank first.")
    streams = message_streams_of(members, transport)
    transfer = StreamTransfer(wire, streams, tensor, peer, verb)
    if transfer.done:
        return transfer
    if verb == "send to":
        if counted:
            LEDGER.count(wire.op, wire.pattern, tensor.nbytes, axis=wire.axis)
        streams.post_send(peer, bytes_of(tensor), transfer)
    else:
        streams.post_receive(peer, bytes_of(tensor), transfer)
    streams.move_in_background()
    return transfer
