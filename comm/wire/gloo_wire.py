"""Send and receive messages with gloo or nccl, and number them.

A `GlooWire` numbers the messages between each pair of ranks, so an algorithm needs no tags. A tag has 20 bits
for this number, and 10 for the turn of the operation: its sequence number in the group, or 0 for plain
point-to-point messages.
"""

import weakref
from collections import defaultdict

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.wire.groups import Group, group_of, peer_trouble, wait_for
from comm.wire.wire import POINT_TO_POINT, Transfer, Wire, check_peer
from lab.trace.ledger import LEDGER

MessageCounts = defaultdict[int, int]  # messages so far by peer
_TURN_BITS, _NUMBER_BITS = 10, 20


class GlooTransfer(Transfer):
    def __init__(
        self,
        wire: "GlooWire",
        work: dist.Work | None,
        tensor: torch.Tensor,
        peer: int,
        verb: str,
        header: bool = False,
    ) -> None:
        super().__init__(wire, tensor, peer, verb, header)
        self._gloo, self._work = wire, work

    def wait(self) -> None:
        work, self._work = self._work, None  # at a second call gloo would wait for another message
        if work is None:
            return
        self._wire.finish_handshake()
        try:
            wait_for(work, self._wire.group)
        except RuntimeError as error:
            raise self._gloo.failed(error, self._peer, self._verb) from error


class GlooWire(Wire):
    def __init__(
        self,
        group: Group,
        op: str,
        pattern: str,
        sequence: int = 0,
        numbers: tuple[MessageCounts, MessageCounts] | None = None,
        counted: bool = True,
    ) -> None:
        super().__init__(group, op, pattern, counted)
        # Turn 0 is for plain point-to-point messages. The collectives use the other turns in a cycle.
        self._turn = 1 + sequence % ((1 << _TURN_BITS) - 1) if sequence else 0
        self._sent, self._received = numbers or (defaultdict(int), defaultdict(int))

    def _start(self, tensor: torch.Tensor, peer: int, verb: str, header: bool) -> Transfer:
        if not tensor.nbytes:
            return GlooTransfer(self, None, tensor, peer, verb)
        sends = verb == "send to"
        counts = self._sent if sends else self._received
        start = self.group.send if sends else self.group.recv
        try:
            work = start([tensor], peer, self._tag(counts, peer))
        except RuntimeError as error:
            raise self.failed(error, peer, verb) from error
        return GlooTransfer(self, work, tensor, peer, verb, header)

    def batch(
        self, outgoing: torch.Tensor, dst: int, incoming: torch.Tensor, src: int
    ) -> tuple[Transfer, Transfer]:
        """Start a send and a receive as one operation of nccl, so that their order does not matter.

        All ranks of the group call it together, with contiguous tensors. One `wait()` ends both transfers.
        """
        check_peer(self.op, self.pattern, self.rank, self.size, dst, "send to")
        check_peer(self.op, self.pattern, self.rank, self.size, src, "receive from")
        if self.counted:
            LEDGER.count(self.op, self.pattern, outgoing.nbytes, axis=self.axis)
        try:
            work, *_ = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing.detach(), group=self.group, group_peer=dst),
                    dist.P2POp(dist.irecv, incoming.detach(), group=self.group, group_peer=src),
                ]
            )
        except RuntimeError as error:
            raise self.failed(error, dst, "send to") from error
        sent = GlooTransfer(self, work, outgoing, dst, "send to")
        return sent, GlooTransfer(self, work, incoming, src, "receive from")

    def _tag(self, counts: MessageCounts, peer: int) -> int:
        number = counts[peer]
        counts[peer] += 1
        return self._turn << _NUMBER_BITS | number % (1 << _NUMBER_BITS)

    def failed(self, error: RuntimeError, peer: int, verb: str) -> CommError:
        name = f"rank {dist.get_global_rank(self.group, peer)}"
        why = peer_trouble(str(error), name)
        return CommError(
            f"{self.op} ({self.pattern}): rank {dist.get_rank()} could not {verb} {name}: {why}."
        )


_peer_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[MessageCounts, MessageCounts]]"
_peer_numbers = weakref.WeakKeyDictionary()


def peer_wire(group: Group, counted: bool = True) -> GlooWire:
    """Return a wire for point-to-point messages of a group. All these wires number messages together."""
    # Keep only the counts: a wire refers to its group, which then would never be freed.
    numbers = _peer_numbers.setdefault(group_of(group), (defaultdict(int), defaultdict(int)))
    return GlooWire(group, POINT_TO_POINT, "direct", numbers=numbers, counted=counted)
