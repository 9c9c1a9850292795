"""Break all connections that this process has opened since a moment, as its death would.

An operation that is under way holds its group, so destroying the group closes nothing, and the peers wait
until their timeout. After `shut_down` the operations of both sides fail at once.
"""

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress


def open_sockets() -> set[int]:
    """Return the inode numbers of the sockets that this process has open."""
    return {inode for _, inode in _sockets()}


def shut_down(before: Collection[int], kept_ports: Collection[int]) -> None:
    """Shut down all connections, except those of `before` and those with one of the ports at either end.

    They stay open as files until their owners close them. Sockets that listen stay as they are.
    """
    for descriptor, inode in _sockets():
        if inode in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            is_listening = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_listening and not _ports(end) & set(kept_ports):
                end.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield the descriptor and the inode number of each open socket."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # such as the one of this folder, which is closed by now
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _ports(end: socket.socket) -> set[int]:
    if end.family == socket.AF_UNIX:
        return set()
    return {end.getsockname()[1], end.getpeername()[1]}
