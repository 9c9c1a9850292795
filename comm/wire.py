"""The wire: the one place where bytes leave, so the one place that counts, numbers and explains them.

A `Wire` belongs to one operation of one group. It numbers the messages between each pair of ranks, so
that every message has a tag of its own and nobody types tags in: my third send to you meets your
third receive from me. Ranks are ranks of the group.
"""

import weakref
from collections import defaultdict

import torch
import torch.distributed as dist

from lab.errors import WorkbookError
from lab.ledger import LEDGER

Group = dist.ProcessGroup | None

_MESSAGE_BITS = 20
_SEQUENCE_BITS = 10


class CommError(WorkbookError):
    """A communication that cannot go on; the text says which one, with whom, and what to look for."""


class Transfer:
    """A message under way; it holds its tensor so that the memory outlives the transfer."""

    def __init__(self, wire: "Wire", work: dist.Work, tensor: torch.Tensor, peer: int, verb: str) -> None:
        self._wire, self.tensor, self._peer, self._verb = wire, tensor, peer, verb
        self._work: dist.Work | None = work

    def wait(self) -> None:
        """Block until the message has arrived, or has left and its memory may be used again.

        Raises CommError when the peer is gone or nothing happens within the group's timeout.
        """
        work, self._work = self._work, None  # gloo would wait for a second message at the second call
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self._wire.failed(error, self._peer, self._verb) from error


class Wire:
    """Non-blocking sends and receives for one operation among the ranks of `group`."""

    def __init__(self, group: Group, op: str, pattern: str, sequence: int = 0) -> None:
        self.group = group_of(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.op, self.pattern, self.sequence = op, pattern, sequence
        # Plain point-to-point messages are operation 0; collectives take turns in the rest.
        turn = 1 + sequence % ((1 << _SEQUENCE_BITS) - 1) if sequence else 0
        self._first_tag = turn << _MESSAGE_BITS
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def isend(self, tensor: torch.Tensor, dst: int, booked_as: str | None = None) -> Transfer:
        """Start sending a contiguous tensor; leave its memory alone until `wait()` returns."""
        tag = self._first_tag + self._sent[dst] % (1 << _MESSAGE_BITS)
        self._sent[dst] += 1
        LEDGER.count(self.op, booked_as or self.pattern, tensor.nbytes)
        try:
            work = self.group.send([tensor], dst, tag)
        except RuntimeError as error:
            raise self.failed(error, dst, "send to") from error
        return Transfer(self, work, tensor, dst, "send to")

    def irecv(self, tensor: torch.Tensor, src: int) -> Transfer:
        """Start receiving into a contiguous tensor of exactly the size and dtype that `src` sends."""
        tag = self._first_tag + self._received[src] % (1 << _MESSAGE_BITS)
        self._received[src] += 1
        try:
            work = self.group.recv([tensor], src, tag)
        except RuntimeError as error:
            raise self.failed(error, src, "receive from") from error
        return Transfer(self, work, tensor, src, "receive from")

    def failed(self, error: RuntimeError, peer: int, verb: str) -> CommError:
        """Translate the backend's complaint into a sentence about ranks."""
        name = f"rank {dist.get_global_rank(self.group, peer)}"
        why = peer_trouble(str(error), name)
        return CommError(
            f"{self.op} ({self.pattern}): rank {dist.get_rank()} could not {verb} {name}: it {why}."
        )


_peer_wires: "weakref.WeakKeyDictionary[dist.ProcessGroup, Wire]" = weakref.WeakKeyDictionary()


def peer_wire(group: Group) -> Wire:
    """The wire for plain sends and receives of a group; its numbers go on from call to call."""
    whole = group_of(group)
    if whole not in _peer_wires:
        _peer_wires[whole] = Wire(group, "point_to_point", "direct", sequence=0)
    return _peer_wires[whole]


def group_of(group: Group) -> dist.ProcessGroup:
    """The group itself, where None stands for all ranks. Raises CommError when there is no group yet."""
    whole = dist.group.WORLD
    if whole is None:
        raise CommError("There is no process group yet: call comm.rendezvous.join() first.")
    return group or whole


def peer_trouble(text: str, peer: str) -> str:
    """What an error text of gloo says about a peer, as the end of a sentence that starts with a rank."""
    if "imed out" in text or "imeout" in text:
        return f"waited in vain until the timeout; {peer} has not come here, is stuck or is paused"
    if any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe")):
        return f"lost the connection; {peer} has died or left, so look for the first error in its log"
    return f"failed: {text}"
