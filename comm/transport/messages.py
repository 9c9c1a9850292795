"""Start point-to-point messages, through shared memory (mailbox.py), gloo or nccl.

With gloo a tensor on a GPU goes by host memory. A slow link may be simulated.

transfer = isend(tensor, dst)          transfer = irecv(tensor, src)
transfer.wait()                        transfer.wait()
"""

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.transport import segment, slow_link
from comm.transport.choice import chosen_transport
from comm.transport.mailbox import MAILBOXES, Mailbox, mailbox_of
from comm.transport.message_ends import Message
from comm.transport.staging import goes_by_host
from comm.transport.wire import Group, Transfer, axis_of, check_peer, group_of, peer_wire
from comm.transport.work_queue import queue_of
from lab.ranks.waiting import Wait
from lab.trace.ledger import LEDGER


class MailTransfer:
    """A message of a mailbox in flight. It holds its group, which so is not freed before the end."""

    def __init__(
        self, mailbox: Mailbox, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, verb: str
    ) -> None:
        self._mailbox, self._group, self.tensor = mailbox, group, tensor
        self._peer, self._verb, self.message = peer, verb, Message(tensor)
        self.copy_to: torch.Tensor | None = None  # a tensor on a GPU to which the arrived message is copied

    def wait(self) -> None:
        """Block until the message has arrived, or until its receiver has it, so that it may be changed.

        Raise CommError if the peer has gone or sends another number of bytes, or at the group's timeout.
        """
        message = self.message
        if not message.is_settled:
            self._mailbox.move_until(message, self._peer, self._verb)
        if message.by_gloo is not None:
            message.by_gloo.wait()
        if message.sent_bytes != message.num_bytes:
            raise CommError(
                f"{self._mailbox.op} ({self._mailbox.pattern}): rank {dist.get_rank()} expects "
                f"{message.num_bytes} bytes from rank {self._mailbox.names[self._peer]}, which has sent "
                f"{message.sent_bytes}. Both need tensors of the same size and dtype."
            )
        if self.copy_to is not None:
            place, self.copy_to = self.copy_to, None
            place.copy_(self.tensor)

    def awaited(self) -> Wait:
        """Return for whom `wait` blocks (lab/ranks/waiting.py)."""
        verb, preposition = self._verb.split()
        name = self._mailbox.names[self._peer]
        return Wait(f"{verb} {self.message.num_bytes} bytes {preposition}", name)


PlainTransfer = Transfer | MailTransfer


class SlowTransfer:
    """A message on a simulated slow link, with a second one that tells when it arrives (slow_link.py)."""

    def __init__(self, payload: PlainTransfer, arrival: PlainTransfer, is_received: bool) -> None:
        self._payload, self._arrival, self._is_received = payload, arrival, is_received

    def wait(self) -> None:
        """Block as `Transfer.wait` does. A receiver also waits for the simulated link."""
        self._payload.wait()
        self._arrival.wait()
        if self._is_received:
            slow_link.wait_for_arrival(int(self._arrival.tensor), self._payload.tensor.nbytes)


AnyTransfer = PlainTransfer | SlowTransfer


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

    The k-th receive from a rank gets its k-th send. Both ranks must know the size. Through shared memory a
    wrong size is a CommError, but gloo does not compare sizes, and dtypes are never compared.
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


def _start(tensor: torch.Tensor, peer: int, verb: str, group: Group, counted: bool = True) -> PlainTransfer:
    """Start a message through the group's mailbox, or over gloo or nccl."""
    members = group_of(group)
    mailbox = _mailbox_of(members)
    if mailbox is not None:
        check_peer(mailbox, peer, verb)
        if not tensor.is_contiguous():
            raise CommError(
                f"{mailbox.op}: the tensor to {verb} a rank must be contiguous in memory; call contiguous() "
                "first."
            )
    if mailbox is None or mailbox.uses_gloo(peer):
        wire = peer_wire(members, counted)
        return wire.isend(tensor, peer) if verb == "send to" else wire.irecv(tensor, peer)
    transfer = MailTransfer(mailbox, members, tensor, peer, verb)
    if not tensor.nbytes:
        return transfer
    if counted and verb == "send to":
        LEDGER.count(mailbox.op, mailbox.pattern, tensor.nbytes, axis=axis_of(members))
    mailbox.post(peer, transfer.message, is_sent=verb == "send to")
    return transfer


def transports_of_messages() -> set[str]:
    """Return how the messages of this rank have travelled: by shared_memory, gloo or nccl."""
    carriers: set[str] = set()
    if chosen_transport(None) in ("auto", "shared_memory"):
        carriers = carriers.union(*(mailbox.carriers() for mailbox in MAILBOXES.values()))
    return carriers or {dist.get_backend()}


def _mailbox_of(group: dist.ProcessGroup) -> Mailbox | None:
    """Return the mailbox of a group whose ranks may share memory; None if gloo or nccl move its messages."""
    transport = chosen_transport(group)
    if transport not in ("auto", "shared_memory") or not segment.is_possible():
        return None
    if dist.get_backend(group) != "gloo" or group.size() == 1:
        return None
    mailbox = mailbox_of(group)
    mailbox.must_share = transport == "shared_memory"
    return mailbox
