"""Move the point-to-point messages of a group through shared memory, without help from ranks that compute.

      rank 0   isend ──► [ring buffer] ──► wait of irecv     a waiting rank moves its own messages
      rank 0   send  ──► [ring buffer]    rank 1 computes: rank 0 knocks, and rank 1's thread takes the message

A message is moved by the thread that posts it, by every thread that waits for a message, and by a thread of
the mailbox that sleeps until a peer knocks (door.py). A rank knocks before it sleeps, if its peer has to move
something and is not waiting itself. So a message arrives once its receive is posted, whatever both ranks do.

Several threads cannot wait for each other: each moves the messages of all, under a lock which none holds while
it sleeps. One of them sleeps until the kernel has news. The others sleep until a thread says that something
has moved, or that it no longer waits for the kernel.
"""

import os
import select
import threading
import time
import weakref
from collections import deque
from contextlib import suppress

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.transport import cross_memory, segment
from comm.transport.door import Door, knock
from comm.transport.first_contact import FirstContact, own_place
from comm.transport.listener import Arrival, connect_locally
from comm.transport.memory_ends import wake
from comm.transport.message_ends import Inbox, Outbox
from comm.transport.wire import POINT_TO_POINT, Transfer, global_ranks, peer_trouble, peer_wire
from comm.transport.work_queue import COMMUNICATION_THREAD
from lab.waiting import Wait

_SPIN_SECONDS = 1e-4


class MailTransfer:
    """A message in flight. It holds its tensor and its group, so that neither is freed before the end."""

    def __init__(
        self, mailbox: "Mailbox", group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, verb: str
    ) -> None:
        self._mailbox, self.group, self.tensor, self.peer, self.verb = mailbox, group, tensor, peer, verb
        self.done = not tensor.nbytes  # an empty tensor is not sent
        self.sent_bytes = tensor.nbytes  # how large the sender's tensor is
        self.by_gloo: Transfer | None = None  # if the two ranks turn out not to share memory
        self.copy_to: torch.Tensor | None = None  # a tensor on a GPU to which the arrived message is copied

    @property
    def is_settled(self) -> bool:
        """Return whether the mailbox has nothing more to do for it."""
        return self.done or self.by_gloo is not None

    def wait(self) -> None:
        """Block until the message has arrived, or until its receiver has it, so that it may be changed.

        Raise CommError if the peer has gone or sends another number of bytes, or at the group's timeout.
        """
        if not self.is_settled:
            self._mailbox.move_until(self)
        if self.by_gloo is not None:
            self.by_gloo.wait()
        if self.sent_bytes != self.tensor.nbytes:
            raise CommError(
                f"{POINT_TO_POINT} (direct): rank {dist.get_rank()} expects {self.tensor.nbytes} bytes from rank "
                f"{self._mailbox.names[self.peer]}, which has sent {self.sent_bytes}. Both need tensors of the "
                "same size and dtype."
            )
        if self.copy_to is not None:
            place, self.copy_to = self.copy_to, None
            place.copy_(self.tensor)

    def awaited(self) -> Wait:
        """Return for whom `wait` blocks (lab/waiting.py)."""
        verb, preposition = self.verb.split()
        return Wait(f"{verb} {self.tensor.nbytes} bytes {preposition}", self._mailbox.names[self.peer], "")


class Peer:
    """Another rank: what is on its way to it and from it."""

    def __init__(self, rank: int, name: int) -> None:
        self.rank, self.name = rank, name
        self.to_send: deque[MailTransfer] = deque()
        self.posted: deque[MailTransfer] = deque()
        self.contact: FirstContact | None = None
        self.token = 0  # of its door, if it shares memory with this rank
        self.uses_gloo = False
        self.out: Outbox | None = None
        self.incoming: Inbox | None = None
        self.trouble: Exception | None = None  # the end of its connection
        self.moved_at = 0.0

    def ends(self) -> list[Outbox | Inbox]:
        """Return the connections that have been made."""
        return [end for end in (self.out, self.incoming) if end is not None]

    def move(self) -> bool:
        """Move something. Return whether anything has moved."""
        moved = False
        try:
            if self.out is not None and self.out.is_busy:
                moved = self.out.push()
            if self.posted and self.incoming is not None:
                moved |= self.incoming.pull()  # also from one that has left: what it sent before is still here
        except OSError as error:
            self.trouble = self.trouble or ConnectionError(f"Connection was likely closed by peer: {error}")
        if moved:
            self.moved_at = time.monotonic()
        return moved

    def needs_a_knock(self) -> bool:
        """Return whether its thread has to move something for this rank, which is about to sleep."""
        if self.out is not None and self.out.is_untaken():
            return True
        return self.incoming is not None and self.incoming.is_wanting()


class Mailbox:
    """The messages of this rank in one group. `must_share`: it is an error if two ranks share no memory."""

    op, pattern = POINT_TO_POINT, "direct"

    def __init__(self, group: dist.ProcessGroup, must_share: bool) -> None:
        self.group = weakref.ref(group)
        self.rank, self.size, self.names = group.rank(), group.size(), global_ranks(group)
        self._must_share = must_share
        self._timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._changed = threading.Condition(threading.Lock())
        self._peers = {rank: Peer(rank, name) for rank, name in enumerate(self.names) if rank != self.rank}
        self._near: list[Peer] = []  # those with a connection
        self._sleeper_is_here = self._is_closed = False
        self._num_followers = 0
        self._door = Door(self.size)
        self.place = own_place(self._door.token)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the sleeper
        self._news = select.poll()
        self._news.register(self._bell, select.POLLIN)
        self._by_number: dict[int, tuple[Peer, Outbox | Inbox]] = {}
        threading.Thread(target=self.in_background, name="mailbox", daemon=True).start()
        weakref.finalize(group, self.close).atexit = False

    def uses_gloo(self, rank: int) -> bool:
        """Return whether it is known that messages to and from a rank do not travel through memory."""
        return self._peers[rank].uses_gloo

    def post_send(self, transfer: MailTransfer) -> None:
        """Queue a message, and send it as far as possible."""
        with self._changed:
            peer = self._peers[transfer.peer]
            peer.to_send.append(transfer)
            self._move_posted(peer)

    def post_receive(self, transfer: MailTransfer) -> None:
        """Queue a receive, and take the message if it is here."""
        with self._changed:
            peer = self._peers[transfer.peer]
            peer.posted.append(transfer)
            self._move_posted(peer)

    def _move_posted(self, peer: Peer) -> None:
        if peer.contact is None:
            peer.contact = FirstContact(self, peer.rank, self._meet)
        elif peer.uses_gloo:
            self._hand_to_gloo(peer)
        moved = False
        while peer.move():
            moved = True
        self._tell(moved or self._sleeper_is_here)

    def move_until(self, transfer: MailTransfer) -> None:
        """Move messages until this one is settled. Raise CommError as `MailTransfer.wait` does."""
        peer, since = self._peers[transfer.peer], time.monotonic()
        with self._changed:
            while not transfer.is_settled:
                if self._move():
                    continue
                left = max(since, peer.moved_at) + self._timeout - time.monotonic()
                self._raise_if_hopeless(peer, transfer, left)
                if self._sleeper_is_here:
                    self._num_followers += 1
                    self._changed.wait(min(1.0, left))
                    self._num_followers -= 1
                elif not self._spin(transfer):
                    self._sleep(peer, left)

    def _move(self) -> bool:
        """Move something of any message. Return whether anything has moved."""
        moved = False
        for peer in self._near:
            moved |= peer.move()
        if moved and self._num_followers:
            self._changed.notify_all()
        return moved

    def _spin(self, transfer: MailTransfer) -> bool:
        """Look again and again for a short time, as Streams do, and let other threads and processes run."""
        if threading.current_thread().name == COMMUNICATION_THREAD:
            return False
        until = time.perf_counter() + _SPIN_SECONDS
        while time.perf_counter() < until:
            self._changed.release()
            try:
                os.sched_yield()
            finally:
                self._changed.acquire()
            if self._move() or transfer.is_settled:
                return True
        return False

    def _sleep(self, awaited: Peer, seconds: float) -> None:
        """Return when something may move, or after a second."""
        self._sleeper_is_here = True
        self._announce_sleep(True)
        try:
            # Between the announcement and this look is a fence, as in Streams.
            if not self._move():
                if awaited.needs_a_knock():
                    knock(awaited.token)
                self._changed.release()
                try:
                    ready = self._news.poll(min(1000.0, seconds * 1000))
                finally:
                    self._changed.acquire()
                self._note(ready)
        finally:
            self._sleeper_is_here = False
            self._announce_sleep(False)
            self._changed.notify_all()  # another thread must sleep for the kernel's news now

    def _note(self, ready: list[tuple[int, int]]) -> None:
        for number, _ in ready:
            if number == self._bell:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif number in self._by_number:
                peer, end = self._by_number[number]
                if not end.is_open():
                    self._forget(peer, ConnectionError("closed by peer"))

    def _announce_sleep(self, sleeps: bool) -> None:
        for peer in self._near:
            for end in peer.ends():
                end.sleep(sleeps)
        segment.fence()

    def _tell(self, something: bool) -> None:
        """Let the other threads look again, if there is something new."""
        if something and self._num_followers:
            self._changed.notify_all()
        if something and self._sleeper_is_here:
            os.eventfd_write(self._bell, 1)

    def _raise_if_hopeless(self, peer: Peer, transfer: MailTransfer, left: float) -> None:
        if peer.trouble is None and left <= 0:
            # The memory of this message may be used for something else now, so no rank must touch it.
            self._forget(peer, TimeoutError("timed out"))
        if isinstance(peer.trouble, CommError):
            raise peer.trouble
        if peer.trouble is not None:
            name = f"rank {peer.name}"
            why = peer_trouble(str(peer.trouble), name)
            raise CommError(
                f"{self.op} ({self.pattern}): rank {dist.get_rank()} could not {transfer.verb} {name}: {why}."
            ) from peer.trouble

    def _forget(self, peer: Peer, trouble: Exception) -> None:
        """Close the connections to a peer. What has arrived can still be taken."""
        peer.trouble = peer.trouble or trouble
        for end in peer.ends():
            if self._by_number.pop(end.socket.fileno(), None):
                self._news.unregister(end.socket)
                end.socket.close()

    def _meet(self, rank: int, token: int, shares: bool, error: Exception | None) -> None:
        """Note what the first contact with a peer has shown, on a thread of its own."""
        peer, connection = self._peers[rank], None
        if error is None and shares:
            try:
                connection = connect_locally((0, 0, token), self.rank, self._timeout)
                error = None if connection else ConnectionError("closed by peer")
            except (CommError, OSError) as failure:
                error = failure
        elif error is None and self._must_share:
            error = CommError(
                f"{self.op} ({self.pattern}): rank {dist.get_rank()} and rank {peer.name} cannot share memory. "
                f"Rank {peer.name} is on another machine or in another container, or has no memory left: then "
                "take the transport auto or gloo."
            )
        with self._changed:
            if connection is not None:
                peer.token, peer.out = token, Outbox(*connection, peer.to_send)
                self._watch(peer, peer.out)
                peer.move()
                if peer.incoming is not None:
                    knock(token)
            elif error is not None:
                peer.trouble = error
            else:
                peer.uses_gloo = True
                self._hand_to_gloo(peer)
            self._tell(True)

    def _hand_to_gloo(self, peer: Peer) -> None:
        for queue, start in ((peer.to_send, "isend"), (peer.posted, "irecv")):
            while queue:
                transfer = queue.popleft()
                wire = peer_wire(transfer.group, counted=False)
                try:
                    transfer.by_gloo = getattr(wire, start)(transfer.tensor, peer.rank)
                except CommError as error:
                    peer.trouble = error

    def _watch(self, peer: Peer, end: Outbox | Inbox) -> None:
        self._by_number[end.socket.fileno()] = peer, end
        self._news.register(end.socket, select.POLLIN)
        if peer not in self._near:
            self._near.append(peer)

    def in_background(self) -> None:
        """Answer the door until the mailbox is closed."""
        while True:
            arrivals = self._door.answer()
            with self._changed:
                if self._is_closed:
                    self._close()
                    return
                for one in arrivals:
                    self._let_in(one)
                moved = True
                while moved:
                    moved = self._move()
                    self._tell(moved)
                self._tell(bool(arrivals))

    def _let_in(self, one: Arrival) -> None:
        peer = self._peers.get(one.rank)
        if peer is None or peer.incoming is not None or one.segment is None:
            one.socket.close()
            return
        pid = cross_memory.peer_of(one.socket)
        if not cross_memory.can_read(pid, one.nonce_address, one.segment.nonce):
            pid = 0
        peer.incoming = Inbox(one.socket, one.segment, pid, peer.posted)
        self._watch(peer, peer.incoming)
        wake(one.socket)  # the sender may wait to know whether this rank reads its memory
        if peer.token:
            knock(peer.token)

    def close(self) -> None:
        """Let the mailbox's thread close all connections. It may be called anywhere: it takes no lock."""
        self._is_closed = True
        knock(self._door.token)

    def _close(self) -> None:
        self._door.close()
        for peer in self._peers.values():
            self._forget(peer, ConnectionError("closed by peer"))
            for end in peer.ends():
                end.close()
            peer.out = peer.incoming = None
        self._near.clear()
        self._tell(True)
        os.close(self._bell)


_mailboxes: "weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox]" = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def mailbox_of(group: dist.ProcessGroup, must_share: bool) -> Mailbox:
    """Return the mailbox of a group. The first message makes it."""
    with _mailboxes_lock:
        if group not in _mailboxes:
            _mailboxes[group] = Mailbox(group, must_share)
        return _mailboxes[group]
