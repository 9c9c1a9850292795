"""Look at processes, as Linux tells it: which are alive, which belong together, and on what they listen."""

import ipaddress
import os
import time
from contextlib import suppress
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process is alive. A zombie is not: it only waits until its exit code is read."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not os.path.isdir("/proc/self")


def session(leader: int) -> list[int]:
    """Return all processes of a session, also multiprocessing's helpers; none without /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                members.append(int(stat.parent.name))
    return members


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


_LISTEN = "0A"


def listening(*pids: int) -> list[tuple[str, int]]:
    """Return IP address and port of every TCP socket on which one of these processes listens."""
    inodes = {link.removeprefix("socket:[").rstrip("]") for pid in pids for link in _open_files(pid)}
    table = "".join(Path(f"/proc/{pids[0]}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return sorted((address, port) for address, port, inode in listed(table) if inode in inodes)


def listed(table: str) -> list[tuple[str, int, str]]:
    """Return IP address, port and inode of the listening sockets in a text like that of /proc/net/tcp."""
    found = []
    for line in table.splitlines():
        _, local, _, state, *_, inode = line.split()[:10]
        if state == _LISTEN:
            address, port = local.split(":")
            found.append((_address(address), int(port, 16), inode))
    return found


def family(pid: int) -> list[int]:
    """Return that process, its children and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended in the meantime
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def _open_files(pid: int) -> list[str]:
    links = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            links.append(os.readlink(file))
    return links


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's order, here little-endian."""
    packed = bytes.fromhex(text)
    words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
    address = ipaddress.ip_address(words)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
