"""The network interface: its name, its address, and its own counter of what left this machine."""

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_bytes_sent(name: str = "eth0") -> int | None:
    """Return the bytes that the interface has sent so far, all layers' headers included; None without it.

    In a container `eth0` carries nothing but the job's traffic. On a laptop all ranks share `lo`.
    """
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def own_address() -> str:
    """Return the IPv4 address under which the other ranks reach this one. OSError if there is none.

    It is that of the interface gloo was told to use (GLOO_SOCKET_IFNAME), else of the one that leads to
    MASTER_ADDR; not what the hostname resolves to, for on many machines that is 127.0.1.1.
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
    """Return the name of the interface that has `own_address`; None where it cannot be found out."""
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
    """Return the IP address of `host`, an IPv4 one where it has both. OSError if it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach that IP address."""
    return ipaddress.ip_address(address).is_loopback


def _address_of(interface: str) -> str:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
