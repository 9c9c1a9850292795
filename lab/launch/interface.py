"""Find the network interface of this rank: its name, its address, and its counter of sent bytes."""

import ipaddress
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_bytes_sent(name: str = "eth0") -> int | None:
    """Return the bytes that the interface has sent, headers of all layers included, or None if it is missing.

    In a container `eth0` carries only the traffic of the job. On a laptop all ranks share `lo`.
    """
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def own_address() -> str:
    """Return the IPv4 address under which the other ranks reach this one. Raise OSError if there is none.

    It is the address of the interface that GLOO_SOCKET_IFNAME names, or else of the one that leads to
    MASTER_ADDR. The hostname does not help: on many machines it resolves to 127.0.1.1.
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
        if is_loopback(address):
            return LOOPBACK
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with suppress(OSError):  # an interface without an address
                if _address_of(name) == address:
                    return name
    return None


def resolved(host: str) -> str:
    """Return the IP address of `host`, IPv4 if it has one. Raise OSError if it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_loopback(address: str) -> bool:
    """Return whether an IP address can be reached from this machine only."""
    return ipaddress.ip_address(address).is_loopback


def _address_of(interface: str) -> str:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


def shut_down_connections() -> None:
    """Shut down this process's TCP connections, so that every wait for a peer ends with an error."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(1024)):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.getpeername()  # an OSError if it listens: gloo would abort the process
                    one.shutdown(socket.SHUT_RDWR)
