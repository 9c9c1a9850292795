"""End a rank when its launcher dies, and count the launcher's restarts.

A rank without its launcher would train on and keep cores, memory and ports.
"""

import os
import select
import threading
import time

# The variable with the process id of make run's launcher. If the launcher dies while a rank imports torch,
# getppid() returns the id of another process.
PID = "WORKBOOK_LAUNCHER"
_POLL = 0.5  # seconds between two checks, where the kernel sends no event


def restart_count() -> int:
    """Return how many times torchrun has started all ranks again, after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def end_with_launcher(rank: int) -> None:
    """End this process, with a message, when its launcher dies: torchrun or the launcher of make run.

    A rank that was started by hand has no launcher, and may outlive its shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = int(os.environ.get(PID) or os.getppid())
        threading.Thread(target=_end_after, args=[launcher, rank], daemon=True).start()


def _end_after(launcher: int, rank: int) -> None:
    _wait_for_the_end_of(launcher)
    # Not print: the main thread may hold the lock of the buffer.
    os.write(2, f"rank {rank}: the launcher (process {launcher}) has died, so this rank ends.\n".encode())
    os._exit(1)


def _wait_for_the_end_of(launcher: int) -> None:
    try:
        ended = os.pidfd_open(launcher)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or a kernel older than 5.3
        while os.getppid() == launcher:
            time.sleep(_POLL)
    else:
        select.select([ended], [], [])
