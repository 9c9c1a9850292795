"""A rank ends when its launcher has died: otherwise it would train on, and keep cores, memory and ports."""

import os
import select
import threading
import time

PID = "WORKBOOK_LAUNCHER"  # holds the id of make run's launcher, which may die while a rank imports torch
_POLL = 0.5  # seconds between two looks, where the kernel does not tell


def end_with_launcher(rank: int) -> None:
    """End this process with a sentence once its launcher dies, torchrun's or that of make run.

    A rank that was started by hand may outlive its shell and is left alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = int(os.environ.get(PID) or os.getppid())
        threading.Thread(target=_end_after, args=[launcher, rank], daemon=True).start()


def _end_after(launcher: int, rank: int) -> None:
    _wait_for_the_end_of(launcher)
    # Not by print: the main thread may hold the lock of its buffer.
    os.write(2, f"rank {rank}: the launcher (process {launcher}) has died, so this rank ends.\n".encode())
    os._exit(1)


def _wait_for_the_end_of(launcher: int) -> None:
    try:
        ended = os.pidfd_open(launcher)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or one that is older than 5.3
        while os.getppid() == launcher:
            time.sleep(_POLL)
    else:
        select.select([ended], [], [])
