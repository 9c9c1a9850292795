"""Look at processes: whether one is alive, and which belong to a session."""

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
