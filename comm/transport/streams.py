"""Move the messages of a group over connections of its own: one byte stream from each rank to each other one.

      while the awaited message has not arrived:
          for each peer:  give the kernel what is queued for it, take what has arrived from it
          if nothing moved:  sleep until the kernel has something to take or to give

gloo hands every message to a thread of its own: the caller posts it, sleeps, and is woken when it has
arrived. On a few busy cores the wake-ups take longer than the copies. Here the rank itself moves the bytes.
It moves those of every posted message, not only of the awaited one. Otherwise two ranks that send each other
more than the kernel buffers would both wait for their own send.

The messages of a stream arrive in the order in which they were posted, so they need no tags.
"""

import select
import time
import weakref
from collections import deque

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.transport import cross_memory, hosts, segment
from comm.transport.choice import chosen_transport
from comm.transport.handshake import RowExchange
from comm.transport.listener import Listener, connect, connect_locally
from comm.transport.memory_ends import MemoryIn, MemoryOut, drain
from comm.transport.spinning import Spinner
from comm.transport.stream_ends import Done, StreamIn, StreamOut
from comm.transport.wire import Group, Wire, global_ranks, group_of, peer_trouble

_SPIN_SECONDS = 3e-4


class Peer:
    """Another rank: a stream in each direction, and the receives that are posted."""

    def __init__(self, rank: int, name: int) -> None:
        self.rank, self.name = rank, name
        self.out: StreamOut | MemoryOut | None = None
        self.incoming: StreamIn | MemoryIn | None = None
        self.has_left = False
        self.posted: deque[tuple[memoryview, Done]] = deque()
        self._filled = 0  # bytes of the first one

    def pull(self) -> bool:
        """Take what has arrived, up to the end of one message. Return whether anything has. Raise OSError."""
        if self.incoming is None or not self.posted:
            return False
        into, transfer = self.posted[0]
        got = self.incoming.receive(into[self._filled :] if self._filled else into, len(into))
        self._filled += got
        if self._filled == len(into):
            self.posted.popleft()
            self._filled, transfer.done = 0, True
        return got > 0

    @property
    def is_busy(self) -> bool:
        """Return whether a message to or from the peer is not done."""
        return bool(self.posted) or (self.out is not None and self.out.is_busy)


class Streams:
    """The connections of one rank to the other ranks of a group. They are made when two ranks first talk."""

    def __init__(
        self, group: dist.ProcessGroup, transport: str, op: str, pattern: str, sequence: int
    ) -> None:
        self.rank, self.size, self.transport = group.rank(), group.size(), transport
        self.names = global_ranks(group)
        self.what = ""  # the operation, for errors
        self._spinner = Spinner(_SPIN_SECONDS)
        self._is_local = transport != "sockets" and segment.is_possible()
        self._deadline = 0.0  # until which something has to move, 0 after something has moved
        self._timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._peers = {rank: Peer(rank, name) for rank, name in enumerate(self.names) if rank != self.rank}
        self._all = list(self._peers.values())
        self._listener = Listener(self.size)
        wire = Wire(group, op, pattern, sequence, counted=False)
        mine = torch.tensor([*self._listener.address(), hosts.own_host()])
        rows = RowExchange(wire, mine).finish().tolist()
        self._addresses, self.hosts = (
            [row[:3] for row in rows],
            hosts.remember(group, [row[3] for row in rows]),
        )
        for name, (_, port, _) in zip(self.names, self._addresses, strict=True):
            if port == 0:
                raise CommError(
                    f"{op} ({pattern}): rank {name} has no address to which a peer could connect."
                )

    def peers(self) -> list[Peer]:
        """Return all other ranks."""
        return self._all

    def post_send(self, dst: int, data: memoryview, transfer: Done) -> None:
        """Queue a message. The stream is made at the first one. Raise CommError if that cannot be."""
        self._talk_to(dst).out.post(data, transfer)  # type: ignore[union-attr]

    def post_receive(self, src: int, into: memoryview, transfer: Done) -> None:
        """Queue a receive of exactly `len(into)` bytes."""
        self._talk_to(src).posted.append((into, transfer))

    def _talk_to(self, rank: int) -> Peer:
        # A receiver connects as well: the connection shows that the sender has died, even before it has sent.
        peer = self._peers[rank]
        if peer.out is None:
            try:
                peer.out = self._connect(peer)
            except OSError as error:
                raise self._failed(peer, f"Connection was likely closed by peer: {error}") from error
        return peer

    def _connect(self, peer: Peer) -> StreamOut | MemoryOut:
        address = self._addresses[peer.rank]
        try:
            if self._is_local and (local := connect_locally(address, self.rank, self._timeout)):
                return MemoryOut(*local)
        except CommError:
            if self.transport == "shared_memory":
                raise
        if self.transport == "shared_memory":
            raise CommError(
                f"{self.what}: rank {dist.get_rank()} and rank {peer.name} cannot share memory. Either rank "
                f"{peer.name} has left, or it is on another machine or in another container: then take the "
                "transport auto or sockets."
            )
        return StreamOut(connect(address, self.rank, self._timeout))

    def finish(self) -> None:
        """Move messages until all that were posted are done."""
        for peer in self._all:
            while peer.is_busy:
                self._move_once(peer)

    def move_until(self, transfer: Done, rank: int) -> None:
        """Move messages until this one, to or from `rank`, is done.

        Raise CommError if a peer with unfinished messages has closed its stream, or if nothing has moved for
        the group's timeout.
        """
        while not transfer.done:
            self._move_once(self._peers[rank])

    def _move_once(self, awaited: Peer) -> None:
        """Move something of any message, or sleep until that is possible."""
        if self._move() or (self._is_local and self._spinner.spin(self._move)):
            return
        for peer in self._all:
            if peer.has_left and peer.is_busy:
                self._accept()  # it may have connected and sent before it left
                if self._move():
                    return
                raise self._failed(peer, "closed by peer")
        now = time.monotonic()
        self._deadline = self._deadline or now + self._timeout
        if now >= self._deadline:
            raise self._failed(awaited, "timed out")
        self._sleep(self._deadline - now)

    def _move(self) -> bool:
        """Move what can be moved of any message, without waiting. Return whether anything has moved."""
        moved = False
        for peer in self._all:
            try:
                if peer.out is not None and peer.out.is_busy and not peer.has_left:
                    moved |= peer.out.push()
                moved |= peer.pull()  # also from a peer that has left: what it sent before is still here
            except OSError:
                moved |= not peer.has_left
                peer.has_left = True
        if moved:
            self._deadline = 0.0
        return moved

    def _sleep(self, seconds: float) -> None:
        """Return when something may move, or after a second."""
        something, outs, ins = select.poll(), {}, {}
        for peer in self._all:
            if peer.has_left:
                continue
            if peer.incoming is not None and peer.posted:
                something.register(peer.incoming.socket, select.POLLIN)
                ins[peer.incoming.socket.fileno()] = peer
            if peer.out is not None and peer.is_busy:
                # Even with no events to wait for, it tells that the peer has closed the connection.
                something.register(peer.out.socket, peer.out.events())
                outs[peer.out.socket.fileno()] = peer
        listening = {end.fileno() for end in self._listener.sockets()}
        for number in listening:
            something.register(number, select.POLLIN)
        self._announce_sleep(True)
        # Between the announcement and this look is a fence: what came before it is seen, and what comes after
        # it wakes this rank.
        ready = [] if self._is_local and self._move() else something.poll(min(1000.0, seconds * 1000))
        self._announce_sleep(False)
        for number, events in ready:
            if number in listening:
                self._accept()
            elif number in ins:
                incoming = ins[number].incoming
                if isinstance(incoming, MemoryIn) and not drain(incoming.socket):
                    ins[number].has_left = True
            elif number in outs:
                out = outs[number].out
                is_open = not isinstance(out, MemoryOut) or drain(out.socket)
                if not is_open or events & (select.POLLHUP | select.POLLERR):
                    outs[number].has_left = True

    def _announce_sleep(self, sleeps: bool) -> None:
        if self._is_local:
            for peer in self._all:
                for end in (peer.out, peer.incoming):
                    if end is not None:
                        end.sleep(sleeps)
            segment.fence()

    def _accept(self) -> None:
        for one in self._listener.accept():
            if one.rank == self.rank or self._peers[one.rank].incoming is not None:
                one.socket.close()
            elif one.segment is None:
                self._peers[one.rank].incoming = StreamIn(one.socket)
            else:
                pid = cross_memory.peer_of(one.socket)
                if not cross_memory.can_read(pid, one.nonce_address, one.segment.nonce):
                    pid = 0
                self._peers[one.rank].incoming = MemoryIn(one.socket, one.segment, pid)

    def close(self) -> None:
        """Close all connections."""
        for peer in self._all:
            for end in (peer.out, peer.incoming):
                if end is not None:
                    end.close()
        self._listener.close()

    def _failed(self, peer: Peer, error: str) -> CommError:
        name = f"rank {peer.name}"
        why = peer_trouble(error, name)
        failed = CommError(f"{self.what}: rank {dist.get_rank()} could not go on with {name}: {why}.")
        failed.__cause__ = ConnectionError(error)
        return failed


_streams: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Streams]]" = weakref.WeakKeyDictionary()


def streams_of(group: Group, transport: str, op: str, pattern: str, sequence: int) -> Streams:
    """Return the streams of a group and transport. The first operation that uses them makes them."""
    process_group = group_of(group)
    made = _streams.setdefault(process_group, {})
    if transport not in made:
        made[transport] = Streams(process_group, transport, op, pattern, sequence)
    return made[transport]


def transports_of(pattern: str, group: Group = None) -> set[str]:
    """Return how a pattern's messages leave this rank: by shared_memory, sockets, gloo or nccl."""
    streams = _streams.get(group_of(group), {}).get(chosen_transport(group))
    if streams is None or pattern == "torch":
        return {dist.get_backend(group)}
    outs = [peer.out for peer in streams.peers() if peer.out is not None]
    return {"shared_memory" if isinstance(out, MemoryOut) else "sockets" for out in outs}


def forget(group: Group) -> None:
    """Close the streams of a group, which may be out of step. The next use connects again."""
    for streams in _streams.pop(group_of(group), {}).values():
        streams.close()
