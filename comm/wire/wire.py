"""Send and receive messages with gloo or nccl, and count and number them.

      wire = Wire(group, "all_reduce", "ring", sequence)
      arriving = wire.irecv(tensor, left)        the k-th receive from a rank gets its k-th send
      leaving = wire.isend(other, right)
      arriving.wait(), leaving.wait()

A `Wire` belongs to one operation of one group, and its ranks are ranks of the group. It numbers the messages
between each pair of ranks, so an algorithm needs no tags. A tag has 20 bits for this number, and 10 for the
turn of the operation: its sequence number in the group, or 0 for plain point-to-point messages.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from lab.ranks.waiting import Wait
from lab.trace.ledger import HEADER, LEDGER

POINT_TO_POINT = "point_to_point"
Group = dist.ProcessGroup | None
MessageCounts = defaultdict[int, int]  # messages so far by peer

_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection was likely closed")
_TURN_BITS, _NUMBER_BITS = 10, 20


class Transfer:
    """A message in flight. It holds its tensor, so that the memory is not freed before the end."""

    def __init__(
        self,
        wire: "Wire",
        work: dist.Work | None,
        tensor: torch.Tensor,
        peer: int,
        verb: str,
        header: bool = False,
    ) -> None:
        self._wire, self.tensor, self._peer, self._verb, self._header = wire, tensor, peer, verb, header
        self._work = work
        self.copy_to: torch.Tensor | None = None  # a tensor on a GPU to which the arrived message is copied

    def wait(self) -> None:
        """Block until the message has arrived, or has left so that its tensor may be changed.

        Raise CommError if the peer has gone, or at the group's timeout.
        """
        work, self._work = self._work, None  # at a second call gloo would wait for another message
        if work is None:
            return
        self._wire.finish_handshake()
        try:
            wait_for(work, self._wire.group)
        except RuntimeError as error:
            raise self._wire.failed(error, self._peer, self._verb) from error
        if self.copy_to is not None:
            self.copy_to.copy_(self.tensor)

    def awaited(self) -> Wait:
        """Return for whom `wait` blocks: a report of a hang draws who waits for whom."""
        peer = dist.get_global_rank(self._wire.group, self._peer)
        verb, preposition = self._verb.split()
        message = "a header" if self._header else f"{self.tensor.nbytes} bytes"
        operation = "" if self._wire.op == POINT_TO_POINT else self._wire.op
        return Wait(f"{verb} {message} {preposition}", peer, operation)


class Wire:
    """Start sends and receives of one operation among the ranks of `group`."""

    def __init__(
        self,
        group: Group,
        op: str,
        pattern: str,
        sequence: int = 0,
        numbers: tuple[MessageCounts, MessageCounts] | None = None,
        counted: bool = True,
    ) -> None:
        self.group = group_of(group)
        # Call methods of the group: the functions of torch.distributed take many times as long.
        self.rank: int = self.group.rank()  # this rank's number in the group, from 0
        self.size: int = self.group.size()  # the number of ranks
        self.op, self.pattern, self.axis = op, pattern, axis_of(self.group)
        self.full_numel = 0  # elements of the full tensor, of which a rank may know only its own shard
        self.counted = counted
        self.check: Callable[[], None] | None = None  # for `finish_handshake` to call, once
        # Turn 0 is for plain point-to-point messages. The collectives use the other turns in a cycle.
        self._turn = 1 + sequence % ((1 << _TURN_BITS) - 1) if sequence else 0
        self._sent, self._received = numbers or (defaultdict(int), defaultdict(int))

    def finish_handshake(self) -> None:
        """Raise Mismatch unless all ranks' headers fit, before this rank waits for its first message."""
        check, self.check = self.check, None
        if check is not None:
            check()

    def finish(self) -> None:
        """Do nothing: an algorithm has waited for its messages. (On streams some may still be leaving.)"""

    def isend(self, tensor: torch.Tensor, dst: int, header: bool = False) -> Transfer:
        """Start to send a contiguous tensor. Keep the transfer and the tensor as they are until `wait()`.

        An empty tensor is not sent, and its receiver does not wait for it.
        """
        return self._start(tensor, dst, "send to", header)

    def irecv(self, tensor: torch.Tensor, src: int, header: bool = False) -> Transfer:
        """Start to receive into a contiguous tensor of exactly the size and dtype that `src` sends."""
        return self._start(tensor, src, "receive from", header)

    def _start(self, tensor: torch.Tensor, peer: int, verb: str, header: bool) -> Transfer:
        check_peer(self.op, self.pattern, self.rank, self.size, peer, verb)
        if not tensor.nbytes:
            return Transfer(self, None, tensor, peer, verb)
        sends = verb == "send to"
        counts = self._sent if sends else self._received
        start = self.group.send if sends else self.group.recv
        if sends and self.counted:
            LEDGER.count(self.op, HEADER if header else self.pattern, tensor.nbytes, axis=self.axis)
        try:
            work = start([tensor], peer, self._tag(counts, peer))
        except RuntimeError as error:
            raise self.failed(error, peer, verb) from error
        return Transfer(self, work, tensor, peer, verb, header)

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
        sent = Transfer(self, work, outgoing, dst, "send to")
        return sent, Transfer(self, work, incoming, src, "receive from")

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


def check_peer(op: str, pattern: str, rank: int, size: int, peer: int, verb: str) -> None:
    """Raise CommError unless `peer` is another rank of the group."""
    # With a rank that is too large gloo kills the process, and with a negative one it never returns.
    if not 0 <= peer < size or peer == rank:
        what = "which is itself" if peer == rank else f"but the group has ranks 0 to {size - 1}"
        raise CommError(f"{op} ({pattern}): rank {rank} is asked to {verb} rank {peer}, {what}.")


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the tensor's memory. (`numpy()` would keep the storage from being freed.)"""
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")


_peer_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[MessageCounts, MessageCounts]]"
_peer_numbers = weakref.WeakKeyDictionary()


def peer_wire(group: Group, counted: bool = True) -> Wire:
    """Return a wire for point-to-point messages of a group. All these wires number messages together."""
    # Keep only the counts: a wire refers to its group, which then would never be freed.
    numbers = _peer_numbers.setdefault(group_of(group), (defaultdict(int), defaultdict(int)))
    return Wire(group, POINT_TO_POINT, "direct", numbers=numbers, counted=counted)


# A copy of a wrapper sends in the same group.
dist.ProcessGroup.__deepcopy__ = lambda group, memo: group  # type: ignore[attr-defined]


def group_of(group: Group) -> dist.ProcessGroup:
    """Return the group, or the group of all ranks for None. Raise CommError if there is none yet."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # else the compiler would report an error of its own
        raise CommError(
            "torch.compile cannot trace communication: compile only layers that do not communicate."
        )
    world = dist.group.WORLD
    if world is None:
        raise CommError("There is no process group yet: call comm.rendezvous.join() first.")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise CommError(f"Rank {dist.get_rank()} is not in this group; only its members may call this.")
    return group or world


_timeouts: "weakref.WeakKeyDictionary[dist.ProcessGroup, timedelta]" = weakref.WeakKeyDictionary()


def timeout_of(group: Group) -> timedelta:
    """Return how long an operation of the group may take: as long as one of the job's own group, at most.

    torch gives a group that the user forms 30 minutes, whatever the job's group has.
    """
    if (timeout := _timeouts.get(own := group_of(group))) is None:
        world = group_of(None)
        backend = torch.device("cuda" if dist.get_backend(world) == "nccl" else "cpu")
        timeout = min(each._get_backend(backend).options._timeout for each in (own, world))
        _timeouts[own] = timeout
    return timeout


def wait_for(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Block until `work` is done. With nccl only the current stream waits."""
    if dist.get_backend(group) == "nccl":  # with a timeout of our own the host would wait, too
        work.wait()
    else:
        work.wait(timeout_of(group))


_axes: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def name_axis(group: Group, axis: str) -> None:
    """Let the ledger count the messages of a group as those of an axis of a mesh, from now on."""
    _axes[group_of(group)] = axis


def axis_of(group: Group) -> str:
    """Return the name that the group got from `name_axis`, or an empty one."""
    return _axes.get(group_of(group), "")


def message_device(group: Group) -> torch.device:
    """Return the device on which a message of this group must be: nccl sends from its GPU only."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def global_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of the group's members among all ranks of the job, as error messages name them."""
    return [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]


def peer_trouble(text: str, peer: str) -> str:
    """Return the cause of an error of gloo, as the end of a sentence.

    It names the rank that left first, if that is known (membership/liveness.py), else `peer`.
    """
    timed_out = "imed out" in text or "imeout" in text
    if gone := liveness.cause(patience=0.0 if timed_out else 1.0):
        return str(gone)
    if timed_out:
        return (
            f"it waited until the timeout; {peer} has not reached this point, is stuck or is paused, "
            "or waits for a rank that is"
        )
    if is_lost_connection(text):
        return f"it lost the connection; {peer} has died or left, so look for the first error in its log"
    return f"it failed: {text}"


def is_lost_connection(text: str) -> bool:
    """Return whether an error of gloo or of torch's store says that a peer closed the connection."""
    return any(sign in text for sign in _LOST)
