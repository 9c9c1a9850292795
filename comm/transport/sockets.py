"""Connect a rank to both ring neighbours, and serve both connections in one loop: patterns "tcp" and "cma".

      left ──► [receive a piece, call arrived(), send what is queued] ──► right       on each rank

The bytes of a ring arrive in a fixed order, so they need no tags: the headers first, then the payload.
"""

import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from comm.transport import cross_memory, streams
from comm.transport.connections import SocketIn, SocketOut
from comm.transport.cross_memory import CmaIn, CmaOut
from comm.transport.handshake import ROW_BYTES, Header, RowExchange, check_rows
from comm.transport.neighbours import Listeners, connect
from comm.transport.wire import Group, Wire, axis_of, global_ranks, group_of
from lab.ledger import LEDGER

# How much is received, and added, at a time: a piece stays in the cache. "cma" needs no wake-up for a piece,
# so smaller pieces cost little.
PIECE_BYTES = {"tcp": 1 << 20, "cma": 1 << 18}
CAN_POLL = hasattr(select, "poll")  # not on Windows
_LOST = "the connection is lost; that rank has died or left, so look for the first error in its log"


class RingSockets:
    """The connections to the right neighbour and from the left one, in a group of at least two ranks.

    In the pattern "cma" a rank reads its left neighbour's memory if it can; else bytes go through a socket.
    """

    def __init__(self, group: dist.ProcessGroup, pattern: str, op: str, sequence: int) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self._names = global_ranks(group)
        self._left_name, self._right_name = self._names[left], self._names[right]
        self._timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self.pattern, self.axis, self._op = pattern, "", op
        self.piece_bytes = PIECE_BYTES[pattern]
        self.is_in_step = True
        self._header: tuple[memoryview, Callable[[], None]] | None = None
        wire = Wire(group, op, pattern, sequence, counted=False)
        self._wants_cma = pattern == "cma" and cross_memory.is_possible()
        with Listeners(unix=self._wants_cma) as listeners:
            rows = RowExchange(wire, torch.tensor(listeners.row())).finish().tolist()
            for name, (_, port, _) in zip(self._names, rows, strict=True):
                if port == 0:
                    who = f"{op} ({pattern}): rank {name}"
                    raise CommError(f"{who} has no address to which its neighbour could connect.")
            deadline = time.monotonic() + self._timeout
            try:
                self._right, self._left = self._meet(wire, listeners, rows[right], deadline)
            except OSError as error:
                why = f"they could not connect ({error})"
                raise self._lost("its neighbours on the ring", why=why) from error
            _close_forgotten(group, pattern)  # all ranks are here, so none reads from the old ring any more

    def _meet(
        self, wire: Wire, listeners: Listeners, row: tuple[int, int, int], deadline: float
    ) -> tuple[SocketOut | CmaOut, SocketIn | CmaIn]:
        """Connect to the right neighbour, which listens at `row`, and accept the left one."""
        with ExitStack() as opened:
            right = opened.enter_context(connect(row, self._wants_cma, deadline))
            # A listener does not notice that the left neighbour has died before it could connect. Waiting for
            # a message from it does.
            have_connected = wire.isend(torch.zeros(1), (self.rank + 1) % self.size, header=True)
            wire.irecv(torch.empty(1), (self.rank - 1) % self.size, header=True).wait()
            have_connected.wait()
            left = opened.enter_context(listeners.accept(deadline))
            pid, is_read = _shake_hands(left, right)
            for end in (left, right):
                end.setblocking(False)
            opened.pop_all()
        return CmaOut(right) if is_read else SocketOut(right), CmaIn(left, pid) if pid else SocketIn(left)

    @property
    def transports(self) -> set[str]:
        """Return how this rank's bytes travel: {"cma"}, {"tcp"}, or both, if its two neighbours differ."""
        return {"cma" if isinstance(end, CmaOut | CmaIn) else "tcp" for end in (self._left, self._right)}

    def exchange_headers(self, mine: Header, agreed: Callable[[int], None]) -> None:
        """Pass all headers around the ring, check them, and call `agreed(check_rows(...))` on every rank.

        Each of two ranks needs the other one's header only. So between two ranks the payload follows at once,
        and a rank checks the header before it reads what follows. With more ranks, each passes on all headers
        before it checks them: if it raised an error earlier, the ranks after it would never get theirs.
        """
        self._op = mine.op
        n = self.size
        packed = bytearray(n * ROW_BYTES)
        rows = [memoryview(packed)[rank * ROW_BYTES : (rank + 1) * ROW_BYTES] for rank in range(n)]
        rows[self.rank][:] = mine.pack()
        sources = [(self.rank - 1 - step) % n for step in range(n - 1)]
        LEDGER.count(mine.op, "header", (n - 1) * ROW_BYTES, n - 1, self.axis)
        queue = deque([rows[self.rank]])

        def pass_on(step: int) -> None:
            if step < n - 2:
                queue.append(rows[sources[step]])

        def check() -> None:
            self.is_in_step = False  # stays so if the check raises
            agreed(check_rows(bytes(packed), self._names))
            self.is_in_step = True

        if n == 2:
            self._send(queue)
            self._header = rows[sources[0]], check
        else:
            self.run(queue, [rows[source] for source in sources], pass_on)
            check()

    def run(
        self, queue: deque[memoryview], incoming: list[memoryview], arrived: Callable[[int], None]
    ) -> None:
        """Send what is in `queue` and fill `incoming`, in order; `arrived(i)` may add to the queue.

        Raise CommError if a neighbour has gone, or nothing has moved for the group's timeout.
        """
        if self._header is not None:
            (theirs, check), self._header = self._header, None
            payload_arrived = arrived
            incoming = [theirs, *incoming]
            arrived = lambda i: payload_arrived(i - 1) if i else check()  # noqa: E731
        last_move = time.monotonic()
        position = filled = 0
        while position < len(incoming) or queue or self._right.is_busy:
            moved = self._push(queue)
            if position < len(incoming):
                moved += (step := self._receive(incoming[position][filled:]))
                filled += step
                if filled == len(incoming[position]):
                    arrived(position)
                    position, filled = position + 1, 0
            if moved:
                last_move = time.monotonic()
                continue
            if time.monotonic() - last_move > self._timeout:
                raise self._nothing_moved(waits_for_left=position < len(incoming))
            something = select.poll()
            if position < len(incoming):
                expected = min(self.piece_bytes, len(incoming[position]) - filled)
                something.register(self._left.socket, self._left.waits_for(expected))
            if queue or self._right.is_busy:
                something.register(self._right.socket, self._right.waits_for())
            something.poll(1000)

    def _send(self, queue: deque[memoryview]) -> None:
        """Return when the kernel has taken all of `queue`. Raise CommError as `run` does."""
        last_move = time.monotonic()
        while queue or self._right.is_leaving:
            if self._push(queue):
                last_move = time.monotonic()
                continue
            if time.monotonic() - last_move > self._timeout:
                raise self._nothing_moved(waits_for_left=False)
            writable = select.poll()
            writable.register(self._right.socket, self._right.waits_for())
            writable.poll(1000)

    def close(self) -> None:
        """Close both connections."""
        self._left.socket.close()
        self._right.socket.close()

    def _push(self, queue: deque[memoryview]) -> int:
        try:
            return self._right.push(queue)
        except OSError as error:
            raise self._lost(f"rank {self._right_name}", self._right) from error

    def _receive(self, into: memoryview) -> int:
        try:
            return self._left.receive(into)
        except OSError as error:
            raise self._lost(f"rank {self._left_name}", self._left) from error

    def _nothing_moved(self, waits_for_left: bool) -> CommError:
        return self._lost(
            f"rank {self._left_name if waits_for_left else self._right_name}",
            self._left if waits_for_left else self._right,
            "nothing moved until the timeout; it, or a rank beyond it on the ring, "
            "has not reached this point, is stuck or is paused",
            patience=0.0,
        )

    def _lost(self, peer: str, end: object = None, why: str = _LOST, patience: float = 1.0) -> CommError:
        """Return the error to raise. It names the transport of `end`, which is tcp if CMA was refused."""
        kind = "tcp" if isinstance(end, SocketOut | SocketIn) else self.pattern
        who = f"{self._op} ({kind}): rank {dist.get_rank()}"
        gone = liveness.cause(patience)
        return CommError(f"{who} could not go on with {peer}: {gone or why}.")


def _shake_hands(left: socket.socket, right: socket.socket) -> tuple[int, bool]:
    """Return the left one's process id, 0 if it refuses its memory, and whether the right one reads ours."""
    nonce = cross_memory.challenge(left) if cross_memory.is_local(left) else b""
    proof = cross_memory.prove(right) if cross_memory.is_local(right) else None
    pid = cross_memory.verify(left, nonce) if nonce else 0
    return pid, proof is not None and cross_memory.answer(right)


_sockets: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, RingSockets]]" = weakref.WeakKeyDictionary()
# Broken rings stay open for a while: a neighbour may still have to read a header that did not fit.
_forgotten: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, RingSockets]]" = (
    weakref.WeakKeyDictionary()
)


def sockets_of(group: Group, pattern: str, op: str, sequence: int) -> RingSockets:
    """Return the ring of a group and pattern. Connect it at its first use, which is this operation."""
    process_group = group_of(group)
    rings = _sockets.setdefault(process_group, {})
    if pattern not in rings:
        rings[pattern] = RingSockets(process_group, pattern, op, sequence)
    rings[pattern].axis = axis_of(group)  # the group may have got its name since
    return rings[pattern]


def transports_of(pattern: str, group: Group = None) -> set[str]:
    """Return how the messages of a pattern have travelled in this group.

    It is a transport of choice.py, "tcp" or "cma" of these two patterns, or the backend: gloo or nccl.
    """
    if (ring := _sockets.get(group_of(group), {}).get(pattern)) is not None:
        return ring.transports
    over_streams = set() if pattern in ("torch", "direct") else streams.transports_in_use(group)
    return over_streams or {dist.get_backend(group)}


def forget(group: Group, pattern: str) -> None:
    """Stop using the ring of a group and pattern, if there is one. The next use connects again."""
    sockets = _sockets.get(group_of(group), {}).pop(pattern, None)
    if sockets is None:
        return
    if sockets.is_in_step:
        sockets.close()
    else:
        _forgotten.setdefault(group_of(group), {})[pattern] = sockets


def _close_forgotten(group: dist.ProcessGroup, pattern: str) -> None:
    if sockets := _forgotten.get(group, {}).pop(pattern, None):
        sockets.close()
