"""Send and receive: this is all that an algorithm needs.

      arriving = wire.irecv(tensor, left)        the k-th receive from a rank gets its k-th send
      leaving = wire.isend(other, right)
      arriving.wait(), leaving.wait()

A wire belongs to one operation of one group, and its ranks are ranks of the group. README.md says how the
bytes move: over gloo or nccl (gloo_wire.py), or over connections of our own (stream_wire.py).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.wire.groups import Group, axis_of, group_of
from lab.ranks.waiting import Wait
from lab.trace.ledger import HEADER, LEDGER

POINT_TO_POINT = "point_to_point"


class Transfer:
    """A message in flight. It holds its tensor, so that the memory is not freed before the end."""

    def __init__(
        self, wire: "Wire", tensor: torch.Tensor, peer: int, verb: str, header: bool = False
    ) -> None:
        self._wire, self.tensor, self._peer, self._verb, self._header = wire, tensor, peer, verb, header

    def wait(self) -> None:
        """Block until the message has arrived, or has left so that its tensor may be changed.

        Raise CommError if the peer has gone, or at the group's timeout.
        """
        raise NotImplementedError

    def awaited(self) -> Wait:
        """Return for whom `wait` blocks: a report of a hang draws who waits for whom."""
        peer = dist.get_global_rank(self._wire.group, self._peer)
        verb, preposition = self._verb.split()
        message = "a header" if self._header else f"{self.tensor.nbytes} bytes"
        operation = "" if self._wire.op == POINT_TO_POINT else self._wire.op
        return Wait(f"{verb} {message} {preposition}", peer, operation)


class Wire:
    """Start sends and receives of one operation among the ranks of `group`."""

    def __init__(self, group: Group, op: str, pattern: str, counted: bool = True) -> None:
        self.group = group_of(group)
        # Call methods of the group: the functions of torch.distributed take many times as long.
        self.rank: int = self.group.rank()  # this rank's number in the group, from 0
        self.size: int = self.group.size()  # the number of ranks
        self.op, self.pattern, self.axis = op, pattern, axis_of(self.group)
        self.counted = counted
        self.check: Callable[[], None] | None = None  # for `finish_handshake` to call, once

    def isend(self, tensor: torch.Tensor, dst: int, header: bool = False) -> Transfer:
        """Start to send a contiguous tensor. Keep the transfer and the tensor as they are until `wait()`.

        An empty tensor is not sent, and its receiver does not wait for it.
        """
        check_peer(self.op, self.pattern, self.rank, self.size, dst, "send to")
        if tensor.nbytes and self.counted:
            LEDGER.count(self.op, HEADER if header else self.pattern, tensor.nbytes, axis=self.axis)
        return self._start(tensor, dst, "send to", header)

    def irecv(self, tensor: torch.Tensor, src: int, header: bool = False) -> Transfer:
        """Start to receive into a contiguous tensor of exactly the size and dtype that `src` sends."""
        check_peer(self.op, self.pattern, self.rank, self.size, src, "receive from")
        return self._start(tensor, src, "receive from", header)

    def finish_handshake(self) -> None:
        """Raise Mismatch unless all ranks' headers fit, before this rank waits for its first message."""
        check, self.check = self.check, None
        if check is not None:
            check()

    def finish(self) -> None:
        """Wait until all messages have left. An algorithm has waited for those that it has received."""

    def _start(self, tensor: torch.Tensor, peer: int, verb: str, header: bool) -> Transfer:
        raise NotImplementedError


def check_peer(op: str, pattern: str, rank: int, size: int, peer: int, verb: str) -> None:
    """Raise CommError unless `peer` is another rank of the group."""
    # With a rank that is too large gloo kills the process, and with a negative one it never returns.
    if not 0 <= peer < size or peer == rank:
        what = "which is itself" if peer == rank else f"but the group has ranks 0 to {size - 1}"
        raise CommError(f"{op} ({pattern}): rank {rank} is asked to {verb} rank {peer}, {what}.")
