"""End a rank when its launcher dies, count the launcher's restarts, and hide a death from it.

A rank without its launcher would train on and keep cores, memory and ports.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time

# The variable with the process id of make run's launcher. If the launcher dies while a rank imports torch,
# getppid() returns the id of another process.
PID = "WORKBOOK_LAUNCHER"
_CHILD = "WORKBOOK_CHILD"  # set in the child of run_in_a_child
_POLL = 0.5  # seconds between two checks, where the kernel sends no event


def restart_count() -> int:
    """Return how many times torchrun has started all ranks again, after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def run_in_a_child(come_back: float | None = None) -> None:
    """Under torchrun, start this script again as a child process, and end as it ends; return in the child.

    If SIGKILL ends the child, this process ends well: torchrun ends all ranks as soon as a process fails. Or
    with `come_back` it starts another child after so many seconds.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _CHILD in os.environ:
        return
    launcher, stops = os.environ.get(PID) or str(os.getppid()), (signal.SIGTERM, signal.SIGINT)
    while True:
        child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {_CHILD: "1", PID: launcher})
        for signum in stops:
            signal.signal(signum, lambda number, frame: child.send_signal(number))
        code = child.wait()
        if code != -signal.SIGKILL:
            sys.exit(code if code >= 0 else 128 - code)
        print(f"rank {os.environ['RANK']} was killed.", file=sys.stderr, flush=True)
        if come_back is None:
            sys.exit(0)
        for signum in stops:
            signal.signal(signum, signal.SIG_DFL)
        time.sleep(come_back)


def end_with_launcher(rank: int) -> None:
    """End this process, with a message, when its launcher dies: torchrun or the launcher of make run."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = int(os.environ.get(PID) or os.getppid())
        threading.Thread(target=_end_after, args=[launcher, rank], daemon=True).start()


def _end_after(launcher: int, rank: int) -> None:
    try:
        select.select([os.pidfd_open(launcher)], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, or a kernel older than 5.3
        while os.getppid() == launcher:
            time.sleep(_POLL)
    # Not print: the main thread may hold the lock of the buffer.
    os.write(2, f"rank {rank}: the launcher (process {launcher}) has died, so this rank ends.\n".encode())
    os._exit(1)
