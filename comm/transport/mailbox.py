"""Move the point-to-point messages of a group through shared memory, whatever its ranks do meanwhile.

      rank 0   isend ──► [ring buffer] ──► wait     rank 1 waits, and takes the message itself
      rank 0   send  ──► [ring buffer]              rank 1 computes: rank 0 knocks, and a thread of rank 1
                                                    takes the message

A message is moved by the thread that posts it, by every thread that waits for a message, and by a thread of
the mailbox that sleeps until a peer knocks (door.py). A rank knocks before it sleeps, if its peer has to move
something and is not waiting itself. So a message arrives once its receive is posted, whatever both ranks do.

Several threads cannot wait for each other: each moves the messages of all, under a lock which none holds
while it sleeps. One of them sleeps until the kernel has news. The others sleep until a thread says that
something has moved, or that it no longer waits for the kernel.
"""

import os
import select
import threading
import time
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.transport import segment
from comm.transport.door import Door, knock
from comm.transport.first_contact import Connection, FirstContact, own_place
from comm.transport.listener import Arrival
from comm.transport.mail_peer import Peer
from comm.transport.memory_ends import wake
from comm.transport.message_ends import Inbox, Message, Outbox, process_of
from comm.transport.spinning import Spinner
from comm.transport.wire import POINT_TO_POINT, Wire, global_ranks, peer_trouble, peer_wire

_SPIN_SECONDS = 1e-4


class Mailbox:
    """The messages of this rank in one group. With `must_share`, ranks that share no memory are an error."""

    op, pattern = POINT_TO_POINT, "direct"
    must_share = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.rank, self.size, self.names = group.rank(), group.size(), global_ranks(group)
        self.timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        self._changed = threading.Condition(threading.Lock())
        self._peers = {rank: Peer(rank, name) for rank, name in enumerate(self.names) if rank != self.rank}
        self._near: list[Peer] = []  # those with a connection
        self._spinner = Spinner(_SPIN_SECONDS)
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
        if self._peers[rank].uses_gloo and self.must_share:
            raise self._cannot_share(self._peers[rank])
        return self._peers[rank].uses_gloo

    def carriers(self) -> set[str]:
        """Return how its messages travel: by shared_memory, by gloo or both."""
        return {peer.carrier for peer in self._peers.values() if peer.carrier}

    def _cannot_share(self, peer: Peer) -> CommError:
        return CommError(
            f"{self.op} ({self.pattern}): rank {dist.get_rank()} and rank {peer.name} cannot share memory. "
            f"Either one of them has none left, or rank {peer.name} is on another machine or in another "
            "container: then take the transport auto or gloo."
        )

    def post(self, rank: int, message: Message, is_sent: bool) -> None:
        """Queue a message to or from a rank, and move it as far as possible."""
        peer = self._peers[rank]
        with self._changed:
            (peer.to_send if is_sent else peer.posted).append(message)
            if peer.contact is None:
                peer.contact = FirstContact(self, rank)
            elif peer.uses_gloo:
                self._hand_to_gloo(peer)
            moved = False
            while peer.move():
                moved = True
            self._tell(moved or self._sleeper_is_here)

    def move_until(self, message: Message, rank: int, verb: str) -> None:
        """Move messages until this one, to or from `rank`, is settled.

        Raise CommError if the peer has gone, or if it has moved nothing for the group's timeout.
        """
        peer, since = self._peers[rank], time.monotonic()
        with self._changed:
            while not message.is_settled:
                if self._move():
                    continue
                left = max(since, peer.moved_at) + self.timeout - time.monotonic()
                if peer.trouble is not None or left <= 0:
                    break
                if self._sleeper_is_here:
                    self._num_followers += 1
                    self._changed.wait(min(1.0, left))
                    self._num_followers -= 1
                elif not self._spin_for(message) and not self._sleeper_is_here:
                    self._sleep(peer, left)
            else:
                return
            if peer.trouble is None:
                self._give_up(peer)
            trouble = peer.trouble
        raise trouble if isinstance(trouble, CommError) else self._failed(peer, verb, trouble)

    def _give_up(self, peer: Peer) -> None:
        """Break with a peer at a timeout: no rank must touch the memory of these messages any more."""
        self._disconnect(peer, TimeoutError("timed out"))
        peer.to_send.clear()
        peer.posted.clear()

    def _failed(self, peer: Peer, verb: str, trouble: Exception | None) -> CommError:
        name = f"rank {peer.name}"
        why = peer_trouble(str(trouble), name)
        failed = CommError(
            f"{self.op} ({self.pattern}): rank {dist.get_rank()} could not {verb} {name}: {why}."
        )
        failed.__cause__ = trouble
        return failed

    def _move(self) -> bool:
        """Move something of any message. Return whether anything has moved."""
        moved = False
        for peer in self._near:
            moved |= peer.move()
        if moved and self._num_followers:
            self._changed.notify_all()
        return moved

    def _spin_for(self, message: Message) -> bool:
        return self._spinner.spin(lambda: self._move() or message.is_settled, self._let_others_run)

    def _let_others_run(self) -> None:
        self._changed.release()
        try:
            os.sched_yield()
        finally:
            self._changed.acquire()

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
                    self._disconnect(peer, ConnectionError("closed by peer"))

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

    def _disconnect(self, peer: Peer, trouble: Exception) -> None:
        """Close the connections to a peer. What has arrived in the ring buffer can still be taken."""
        peer.trouble = peer.trouble or trouble
        for end in peer.ends():
            if self._by_number.pop(end.socket.fileno(), None):
                self._news.unregister(end.socket)
                end.socket.close()

    def meet(self, rank: int, token: int, connection: Connection | None, error: Exception | None) -> None:
        """Note what the first contact with a rank has shown. It is called on a thread of its own."""
        peer = self._peers[rank]
        with self._changed:
            if connection is not None:
                peer.token, peer.out = token, Outbox(*connection, peer.to_send)
                self._watch(peer, peer.out)
                peer.move()
                if peer.incoming is not None:
                    knock(token)
            elif error is not None or self.must_share:
                peer.trouble = error or self._cannot_share(peer)
            else:
                peer.uses_gloo = True
                self._hand_to_gloo(peer)
            self._tell(True)

    def _hand_to_gloo(self, peer: Peer) -> None:
        group = self.group()
        for queue, start in ((peer.to_send, Wire.isend), (peer.posted, Wire.irecv)):
            while queue and group is not None:
                message = queue.popleft()
                try:
                    message.by_gloo = start(peer_wire(group, counted=False), message.tensor, peer.rank)
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
        pid = process_of(one.socket, one.segment, one.nonce_address)
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
            self._disconnect(peer, ConnectionError("closed by peer"))
            for end in peer.ends():
                end.close()
            peer.out = peer.incoming = None
        self._near.clear()
        self._tell(True)
        os.close(self._bell)


MAILBOXES: "weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox]" = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def mailbox_of(group: dist.ProcessGroup) -> Mailbox:
    """Return the mailbox of a group. The first message makes it."""
    mailbox = MAILBOXES.get(group)
    if mailbox is None:
        with _mailboxes_lock:
            mailbox = MAILBOXES.get(group) or Mailbox(group)
            MAILBOXES[group] = mailbox
    return mailbox
