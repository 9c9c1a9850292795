"""The network interface: its address, and its own counter of what left this machine, whoever sent it."""

import os
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_bytes_sent(name: str = "eth0") -> int | None:
    """Bytes that interface has sent since it came up, headers of all layers included; None without it.

    In a container `eth0` carries nothing but the job's traffic. On a laptop all ranks share `lo`.
    """
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None


def own_address() -> str:
    """The IPv4 address under which the other ranks reach this one. OSError if there is none.

    That of the interface gloo was told to use (GLOO_SOCKET_IFNAME), else of the one that leads to
    MASTER_ADDR; not what the hostname resolves to, for on many machines that is 127.0.1.1.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface.startswith("lo"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface and sys.platform == "linux":
            import fcntl

            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        probe.connect((os.environ.get("MASTER_ADDR") or "localhost", 1))  # sends nothing
        return probe.getsockname()[0]
