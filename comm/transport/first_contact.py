"""Let two ranks learn, at their first message, whether they share memory: a greeting in both directions.

      rank 0   isend to rank 1     greeting ──► over gloo          rank 0 goes on
      rank 1   irecv from rank 0   greeting ──► over gloo          both threads have two greetings, and decide

Only the two ranks of a message call anything, perhaps at very different times, and neither waits for the
other. So each sends its greeting over gloo, and a thread waits for the other's. Both have the same two
greetings, and decide alike. gloo also tells the thread if the peer ends before its first message.
"""

import atexit
import hashlib
import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from comm.errors import CommError
from comm.transport import segment
from comm.transport.listener import connect_locally
from lab.launch.interface import shut_down_connections

if TYPE_CHECKING:
    from comm.transport.mailbox import Mailbox

_TAG = (1 << 20) - 1  # of a greeting: plain messages over gloo (wire.py) get there after a million others
_EVER = timedelta(days=365)
_threads: list[threading.Thread] = []
Connection = tuple[socket.socket, segment.Segment]


def own_place(token: int) -> torch.Tensor:
    """Return this rank's greeting: the token of its door, its machine, and whether it has memory to share.

    Two ranks are on the same machine if they see each other's Unix sockets: with one kernel and one network
    namespace. Containers usually have a namespace each.
    """
    machine = ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    number = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:7], "little")
    return torch.tensor([token, number, bool(machine) and _has_memory()])


def _has_memory() -> bool:
    try:
        tried, descriptor = segment.create()
    except CommError:
        return False
    tried.close()
    os.close(descriptor)
    return True


class FirstContact:
    """The exchange of greetings with one rank. The mailbox's method `meet` gets the outcome."""

    def __init__(self, mailbox: "Mailbox", rank: int) -> None:
        self._mine, self._theirs = mailbox.place, torch.empty(3, dtype=torch.int64)
        self._rank, self._mailbox = rank, mailbox
        group, error = mailbox.group(), None
        try:
            assert group is not None
            self._works = [group.recv([self._theirs], rank, _TAG), group.send([self._mine], rank, _TAG)]
        except RuntimeError as failure:
            self._works, error = [], failure
        del group  # or the thread would keep it from being freed
        thread = threading.Thread(target=self.in_background, args=(error,), name="first contact", daemon=True)
        _threads[:] = [*(one for one in _threads if one.is_alive()), thread]
        thread.start()

    def in_background(self, error: Exception | None) -> None:
        """Wait for the other greeting, and tell the mailbox."""
        try:
            while self._works:
                self._works.pop(0).wait(_EVER)
        except RuntimeError as failure:
            error = error or failure
        token, *place = self._theirs.tolist()
        connection: Connection | None = None
        if error is None and place == self._mine[1:].tolist() and self._mine[2]:
            try:
                connection = connect_locally((0, 0, token), self._mailbox.rank, self._mailbox.timeout)
                error = None if connection else ConnectionError("closed by peer")
            except (CommError, OSError) as failure:
                error = failure
        self._mailbox.meet(self._rank, token, connection, error)


@atexit.register
def _end_waits() -> None:
    """End the threads that wait in gloo: one that returned while Python ends would abort the process."""
    for thread in _threads:
        thread.join(0.05)  # it may be about to end
    if any(thread.is_alive() for thread in _threads):
        shut_down_connections()
    for thread in _threads:
        thread.join(1.0)
