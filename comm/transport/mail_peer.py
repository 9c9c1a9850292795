"""Keep what a mailbox (mailbox.py) knows about one peer: the queues of messages, and the connections."""

import time
from collections import deque

from comm.transport.first_contact import FirstContact
from comm.transport.message_ends import Inbox, Message, Outbox


class Peer:
    """Another rank: what is on its way to it and from it."""

    def __init__(self, rank: int, name: int) -> None:
        self.rank, self.name = rank, name
        self.to_send: deque[Message] = deque()
        self.posted: deque[Message] = deque()
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

    @property
    def carrier(self) -> str:
        """Return how messages to and from the peer travel; nothing before the first one."""
        return "gloo" if self.uses_gloo else "shared_memory" if self.ends() else ""

    def move(self) -> bool:
        """Move something. Return whether anything has moved."""
        moved = False
        try:
            if self.out is not None and self.out.is_busy:
                moved = self.out.push()
            if self.posted and self.incoming is not None:
                moved |= (
                    self.incoming.pull()
                )  # also from one that has left: what it sent before is still here
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
