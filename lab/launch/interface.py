"""Find this rank's network interface and its address, listen on one address only, and end connections."""

import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_bytes_sent(name: str = "eth0") -> int | None:
    """Return the bytes that the interface has sent, with the headers of all layers; None if it is missing."""
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def own_address() -> str:
    """Return the IPv4 address under which the other ranks reach this one. Raise OSError if there is none.

    It is that of the interface GLOO_SOCKET_IFNAME, or else of the one that leads to MASTER_ADDR.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface.startswith("lo"):
        return "127.0.0.1"
    if interface and sys.platform == "linux":
        return _address_of(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR") or "localhost", 1))  # sends nothing
        return probe.getsockname()[0]


def own_interface() -> str | None:
    """Return the name of the interface that has `own_address`, or None if it cannot be found."""
    with suppress(OSError):
        address = own_address()
        if address.startswith("127."):
            return LOOPBACK
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with suppress(OSError):  # an interface without an address
                if _address_of(name) == address:
                    return name
    return None


def _address_of(interface: str) -> str:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def open_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a rendezvous store that listens on one address only, unlike torch's own; port 0 is a free one.

    Raise OSError if the port is in use, or if no interface of this machine has the address.
    """
    listener = socket.create_server((address, port))
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def open_sockets() -> set[int]:
    """Return the inode numbers of the sockets that this process has open."""
    return {inode for _, inode in _sockets()}


def shut_down_connections(before: Collection[int] | None = None, kept_ports: Collection[int] = ()) -> None:
    """Shut down this process's connections, as its death would: every wait for a peer ends with an error.

    The sockets of `before` stay, and those with one of the ports at either end. Without `before` only TCP is
    shut down, because connections within the machine may lead to the parent.
    """
    for descriptor, inode in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            is_unix = one.family == socket.AF_UNIX
            stays = is_unix if before is None else inode in before
            if stays:
                continue
            ends = one.getsockname(), one.getpeername()  # an OSError if it listens: gloo would abort
            if is_unix or not {end[1] for end in ends} & set(kept_ports):
                one.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # such as the one of this folder, which is closed by now
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino
