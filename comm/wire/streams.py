"""Move the messages of a group over connections of its own: one byte stream from each rank to each other one.

      while the awaited message has not arrived:
          for each peer:  give the kernel what is queued for it, take what has arrived from it
          if nothing moved:  sleep until the kernel has something to take or to give

README.md says why the rank itself moves the bytes of every posted message ("Progress"), and why the messages
of a stream need no tags ("Order"). A group has two sets of streams, because collectives and point-to-point
messages mix in any order. The headers of a collective have shown what will come. A point-to-point message
brings its number of bytes along (Frame), and its send is done when the receiver has confirmed it. A thread of
the streams moves it while its rank computes.
"""

import json
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from multiprocessing.util import Finalize

import torch.distributed as dist

from comm.errors import CommError
from comm.membership import liveness
from comm.wire import shared_memory
from comm.wire.gloo_wire import GlooWire
from comm.wire.groups import Group, global_ranks, group_of, peer_trouble, timeout_of
from comm.wire.handshake import exchange_numbers
from comm.wire.shared_memory import Done, MemoryIn, MemoryOut, drain, wake
from comm.wire.sockets import Address, Listener, StreamIn, StreamOut, connect
from comm.wire.transport import chosen_transport
from comm.wire.wire import Wire
from comm.wire.work_queue import COMMUNICATION_THREAD

# Falling asleep and being woken takes longer than a small message. Without spinning an all-reduce of 1 or
# 64 KiB took 1.3 times as long, and of 1 MiB 1.1 times, on 2 and on 4 ranks of 2 cores. 0.1 and 1 ms were
# as good.
_SPIN_SECONDS = 3e-4
# The nap of the thread that moves messages while no other does, and of ranks that have not met yet. If
# nothing moves, it sleeps longer, because computing has to wait each time it wakes: with 2 ms always,
# 1F1B took 1.04 of torch's time on 2 ranks, and 0.94 with up to 20 ms. With 20 ms always, 8 MiB beside a
# computation of 30 ms took 1.3 times as long.
_NAP, _LONGEST_NAP = 2e-3, 2e-2
_HELPER = "messages"  # the name of that thread
_FRAME = struct.Struct("=q")
_is_ending = threading.Event()


def _end_helpers() -> None:
    """Stop the threads before the interpreter ends: one that is inside torch then would abort the process."""
    _is_ending.set()
    for thread in threading.enumerate():
        if thread.name == _HELPER:
            thread.join(5)


Finalize(None, _end_helpers, exitpriority=0)  # after the work that lab/launch/ending.py completes


class Frame:
    """The number of bytes of the message that follows it."""

    def __init__(self, num_bytes: int, peer: "Peer") -> None:
        self._num_bytes, self._peer, self.done = num_bytes, peer, False
        self.data = memoryview(bytearray(_FRAME.pack(num_bytes)))

    def validate(self) -> None:
        """Raise OSError if what has arrived announces another number of bytes than this rank expects."""
        [sent] = _FRAME.unpack(self.data)
        if sent != self._num_bytes:
            self._peer.trouble = (
                f"rank {dist.get_rank()} expects {self._num_bytes} bytes from rank {self._peer.name}, which "
                f"has sent {sent}. Both need tensors of the same size and dtype"
            )
            raise ConnectionError(self._peer.trouble)


class Peer:
    """Another rank: a stream in each direction, the receives that are posted and the unconfirmed sends."""

    def __init__(self, rank: int, name: int, has_frames: bool) -> None:
        self.rank, self.name = rank, name
        self.has_frames = has_frames  # as point-to-point messages have
        self.address: Address | None = None
        self.out: StreamOut | MemoryOut | None = None
        self.incoming: StreamIn | MemoryIn | None = None
        self.has_left = False
        self.trouble = ""  # why the connection was closed here
        self.unsent: deque[tuple[memoryview, Done]] = deque()  # until the two ranks have met
        self.posted: deque[tuple[memoryview, Done]] = deque()
        self.unconfirmed: deque[Done] = deque()
        self._filled = 0  # bytes of the first one that is posted

    def pull(self) -> bool:
        """Take what has arrived, up to the end of one message. Return whether anything has. Raise OSError."""
        if self.trouble:
            raise ConnectionError(self.trouble)
        confirmed = self.out.num_taken() if self.out is not None and self.unconfirmed else 0
        for _ in range(confirmed):
            self.unconfirmed.popleft().done = True
        if self.incoming is None or not self.posted:
            return confirmed > 0
        data, transfer = self.posted[0]
        got = self.incoming.receive(data[self._filled :] if self._filled else data)
        self._filled += got
        if self._filled == len(data):
            self.posted.popleft()
            self._filled, transfer.done = 0, True
            if isinstance(transfer, Frame):
                transfer.validate()
            elif self.has_frames:
                self.incoming.confirm()
        return got + confirmed > 0

    @property
    def is_busy(self) -> bool:
        return bool(self.posted or self.unconfirmed or self.unsent) or (
            self.out is not None and self.out.is_busy
        )

    def close(self) -> None:
        for end in (self.out, self.incoming):
            if end is not None:
                end.close()
        self.out = self.incoming = None
        self.posted.clear()
        self.unconfirmed.clear()
        self.unsent.clear()


class Streams:
    """The connections of one rank to the other ranks of a group. They are made when two ranks first talk."""

    def __init__(self, group: dist.ProcessGroup, transport: str, has_frames: bool = False) -> None:
        self.rank, self.size, self.transport = group.rank(), group.size(), transport
        self.names = global_ranks(group)
        self.what = ""  # the operation, for errors
        self.has_frames = has_frames
        self._lock = threading.Lock()  # held while messages are moved, and not while a thread sleeps
        self._a_thread_sleeps = False
        self._bell = socket.socketpair()  # wakes that thread when another one has moved something
        self._helper: threading.Thread | None = None
        self._is_local = transport != "sockets" and shared_memory.is_possible()
        self._deadline = 0.0  # until which something has to move, 0 after something has moved
        self._timeout = timeout_of(group).total_seconds()
        others = [(rank, name) for rank, name in enumerate(self.names) if rank != self.rank]
        self._peers = {rank: Peer(rank, name, has_frames) for rank, name in others}
        self.peers = list(self._peers.values())
        for end in self._bell:
            end.setblocking(False)
        self._listener = Listener(self.size)
        self._store: dist.Store | None = None

    def exchange_addresses(self, wire: Wire) -> None:
        addresses = exchange_numbers(wire, self._listener.address())
        for name, (_, port, _) in zip(self.names, addresses, strict=True):
            if port == 0:
                raise CommError(f"{self.what}: rank {name} has no address to which a peer could connect.")
        for peer in self.peers:
            address, port, token = addresses[peer.rank]
            peer.address = address, port, token

    def publish_address(self, store: dist.Store) -> None:
        """Write this rank's address to the store, where a peer finds it once one of the two has a message."""
        self._store = dist.PrefixStore(f"messages/{self.transport}", store)
        self._store.set(str(self.rank), json.dumps(self._listener.address()))

    def post_send(self, dst: int, data: memoryview, transfer: Done) -> None:
        """Queue a message. The stream is made at the first one. Raise CommError if that cannot be."""
        with self._lock:
            peer = self._peers[dst]
            if self.has_frames:
                frame = Frame(len(data), peer)
                peer.unsent.append((frame.data, frame))
                peer.unconfirmed.append(transfer)
                transfer = frame  # of a message that leaves, only the confirmation counts
            peer.unsent.append((data, transfer))
            self._talk_to(peer, "send to")

    def post_receive(self, src: int, data: memoryview, transfer: Done) -> None:
        with self._lock:
            peer = self._peers[src]
            if self.has_frames:
                frame = Frame(len(data), peer)
                peer.posted.append((frame.data, frame))
            peer.posted.append((data, transfer))
            # A receiver connects as well: so it sees that the sender has died, even before it has sent.
            self._talk_to(peer, "receive from")

    def move_in_background(self) -> None:
        """Move what can be moved now, and let a thread move the rest while this rank does something else."""
        with self._lock:
            self._tell(self._move())
            if self._helper is None and any(peer.is_busy for peer in self.peers):
                self._helper = threading.Thread(target=self.in_background, name=_HELPER, daemon=True)
                self._helper.start()

    def in_background(self) -> None:
        """Move messages every few milliseconds until all are done, unless another thread does."""
        nap = _NAP
        while not _is_ending.wait(nap):
            with self._lock:
                if not any(peer.is_busy and not peer.has_left for peer in self.peers):
                    self._helper = None
                    return
                if not self._a_thread_sleeps:
                    try:
                        self._meet()
                        self._accept()
                        nap = min(2 * nap, _LONGEST_NAP)
                        while self._move():
                            nap = _NAP
                    except CommError:  # the rank that waits raises it
                        self._helper = None
                        return

    def _talk_to(self, peer: Peer, verb: str = "reach") -> None:
        if peer.out is None and not peer.has_left and self._knows_address(peer, verb):
            try:
                peer.out = self._connect(peer)
            except OSError as error:
                raise self._failed(peer, f"Connection was likely closed by peer: {error}", verb) from error
        while peer.out is not None and peer.unsent:
            peer.out.post(*peer.unsent.popleft())

    def _knows_address(self, peer: Peer, verb: str) -> bool:
        """Return whether the peer's address is known. If not, look into the store, and for a death."""
        if peer.address is None and self._store is not None:
            try:
                if self._store.check([str(peer.rank)]):
                    peer.address = tuple(json.loads(self._store.get(str(peer.rank))))
            except RuntimeError as error:
                raise self._failed(peer, f"Connection was likely closed by peer: {error}", verb) from error
            gone = liveness.cause(0) if peer.address is None else None
            if gone is not None and (gone.how != "finished" or gone.rank == peer.name):
                raise self._failed(peer, "closed by peer", verb)
        return peer.address is not None

    def _connect(self, peer: Peer) -> StreamOut | MemoryOut:
        assert peer.address is not None
        connection, buffer = connect(peer.address, self.rank, self._timeout, share=self._is_local)
        if buffer is not None:
            return MemoryOut(connection, buffer)
        if self.transport == "shared_memory":
            connection.close()
            raise CommError(
                f"{self.what}: rank {dist.get_rank()} and rank {peer.name} cannot share memory: "
                "they are on two machines or in two containers. Take the transport auto or sockets."
            )
        return StreamOut(connection)

    def finish(self) -> None:
        with self._lock:
            for peer in self.peers:
                while peer.is_busy:
                    self._move_once(peer, None)

    def move_until(self, transfer: Done, rank: int, verb: str) -> None:
        """Move messages until this one, to or from `rank`, is done.

        Raise CommError if a peer with unfinished messages has closed its stream, or if nothing has moved for
        the group's timeout. For a point-to-point message only its own peer counts.
        """
        with self._lock:
            while not transfer.done:
                self._move_once(self._peers[rank], transfer, verb if self.has_frames else "reach")

    def _move_once(self, awaited: Peer, transfer: Done | None, verb: str = "reach") -> None:
        """Move something of any message, or sleep until that is possible or another thread has done it."""
        has_met_all = self._meet(awaited, verb)
        if self._move() or self._spin() or (transfer is not None and transfer.done):
            self._tell(True)
            return
        for peer in [awaited] if self.has_frames else self.peers:
            if peer.has_left and (peer.is_busy or self.has_frames):
                self._accept()  # it may have connected and sent before it left
                if self._move():
                    return
                raise self._failed(peer, "closed by peer", verb)
        now = time.monotonic()
        self._deadline = self._deadline or now + self._timeout
        if now >= self._deadline:
            raise self._failed(awaited, "timed out", verb)
        self._sleep(self._deadline - now if has_met_all else _NAP)

    def _tell(self, something: bool) -> None:
        """Wake the thread that sleeps if this one has moved something: perhaps that one waits for it."""
        if something and self._a_thread_sleeps:
            wake(self._bell[1])

    def _meet(self, awaited: Peer | None = None, verb: str = "reach") -> bool:
        """Connect to peers for which something is posted. Return whether all of these are connected."""
        if not self.has_frames:
            return True  # all addresses are known, so the first post has connected
        unmet = [peer for peer in self.peers if peer.out is None and peer.is_busy and not peer.has_left]
        for peer in unmet:
            self._talk_to(peer, verb if peer is awaited else "reach")
        return all(peer.out is not None for peer in unmet)

    def _move(self) -> bool:
        """Move what can be moved of any message, without waiting. Return whether anything has moved."""
        moved = False
        for peer in self.peers:
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

    def _spin(self) -> bool:
        """Look for messages for a short time, and let other ranks run meanwhile. Return whether any moved."""
        if not self._is_local or threading.current_thread().name == COMMUNICATION_THREAD:
            return False  # a communication thread never spins: the rank computes meanwhile
        end = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < end:
            self._lock.release()
            os.sched_yield()
            self._lock.acquire()
            if self._move():
                return True
        return False

    def _sleep(self, seconds: float) -> None:
        """Return when something may move, or after a second."""
        if self._a_thread_sleeps:  # it moves the messages of all; but it does not know the newest ones
            self._lock.release()
            time.sleep(_NAP / 10)
            self._lock.acquire()
            return
        something, outs, ins = select.poll(), {}, {}
        for peer in self.peers:
            if peer.has_left:
                continue
            if peer.incoming is not None and peer.posted:
                something.register(peer.incoming.socket, select.POLLIN)
                ins[peer.incoming.socket.fileno()] = peer
            if peer.out is not None and peer.is_busy:
                # Even with no events to wait for, it tells that the peer has closed the connection.
                something.register(peer.out.socket, peer.out.events(bool(peer.unconfirmed)))
                outs[peer.out.socket.fileno()] = peer
        listening = {end.fileno() for end in self._listener.sockets}
        for number in (*listening, self._bell[0].fileno()):
            something.register(number, select.POLLIN)
        self._announce_sleep(True)
        # Between the announcement and this look is a fence: what came before it is seen, and what comes after
        # it wakes this rank.
        ready = [] if self._is_local and self._move() else self._polled(something, min(1.0, seconds))
        self._announce_sleep(False)
        for number, events in ready:
            if number == self._bell[0].fileno():
                drain(self._bell[0])
            elif number in listening:
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

    def _polled(self, something: "select.poll", seconds: float) -> list[tuple[int, int]]:
        self._a_thread_sleeps = True
        self._lock.release()
        try:
            return something.poll(seconds * 1000)
        finally:
            self._lock.acquire()
            self._a_thread_sleeps = False

    def _announce_sleep(self, sleeps: bool) -> None:
        if self._is_local:
            for peer in self.peers:
                if peer.out is not None:
                    peer.out.sleep(sleeps and peer.is_busy)
                if peer.incoming is not None:
                    peer.incoming.sleep(sleeps)
            shared_memory.fence()

    def _accept(self) -> None:
        for rank, connection, buffer in self._listener.accept():
            self._peers[rank].incoming = (
                StreamIn(connection) if buffer is None else MemoryIn(connection, buffer)
            )

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        for end in self._bell:
            end.close()
        self._listener.close()

    def _failed(self, peer: Peer, error: str, verb: str = "reach") -> CommError:
        name = f"rank {peer.name}"
        why = peer.trouble or peer_trouble(error, name)
        failed = CommError(f"{self.what}: rank {dist.get_rank()} could not {verb} {name}: {why}.")
        failed.__cause__ = ConnectionError(error)
        self._deadline = 0.0
        if self.has_frames:  # no rank must touch the memory of these messages any more
            peer.has_left, peer.trouble = True, why
            peer.close()
        return failed


Made = dict[tuple[str, bool], Streams]  # by transport, and whether for point-to-point messages
_streams: "weakref.WeakKeyDictionary[dist.ProcessGroup, Made]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def streams_of(group: Group, transport: str, op: str, pattern: str, sequence: int) -> Streams:
    """Return the streams of a group's collectives. The first operation that uses them makes them."""
    members = group_of(group)
    made = _streams.setdefault(members, {})
    if (transport, False) not in made:
        streams = Streams(members, transport)
        streams.what = f"{op} ({pattern})"
        streams.exchange_addresses(GlooWire(group, op, pattern, sequence, counted=False))
        made[transport, False] = streams
    return made[transport, False]


def message_streams_of(group: dist.ProcessGroup, transport: str) -> Streams:
    """Return the streams of a group's point-to-point messages. The first message makes them."""
    with _lock:
        made = _streams.setdefault(group, {})
        if (transport, True) not in made:
            streams = Streams(group, transport, has_frames=True)
            streams.what = "point_to_point (direct)"
            streams.publish_address(group.get_group_store())
            made[transport, True] = streams
        return made[transport, True]


def transports_of(pattern: str) -> set[str]:
    """Return how a pattern's messages leave this rank: by shared_memory, sockets, gloo or nccl.

    The pattern "direct" stands for the point-to-point messages of all groups.
    """
    if pattern == "direct":
        keys = [(made, key) for made in _streams.values() for key in made if key[1]]
    else:
        keys = [(_streams.get(group_of(None), {}), (chosen_transport(), False))]
    peers = [peer for made, key in keys if key in made for peer in made[key].peers]
    ends = [end for peer in peers for end in (peer.out, peer.incoming) if end is not None]
    if not ends or pattern == "torch" or chosen_transport() == "gloo":
        return {dist.get_backend()}
    return {"shared_memory" if isinstance(end, MemoryOut | MemoryIn) else "sockets" for end in ends}


def forget(group: Group) -> None:
    """Close the streams of a group's collectives, which may be out of step. The next use connects again."""
    made = _streams.get(group_of(group), {})
    for key in [key for key in made if not key[1]]:
        made.pop(key).close()
