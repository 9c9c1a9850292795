"""Find out where ranks are stuck, or still computing: which line each of their threads has reached.

A parent asks a rank by its pipe. A thread of the rank answers: it writes the stacks of all threads to a file.
It holds Python's lock (the GIL) meanwhile, so that no stack changes. A signal handler would not hold it, and
reading the stack of a thread that runs can end in a segmentation fault. So a rank is sent the signal only if
that thread does not answer, as when C code keeps the lock.
"""

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from lab.ranks.waiting import current_wait, write_wait

BACKGROUND = "in_background"  # names the function of a thread that only serves the rank's other threads
ASK = b"Where are you, and for whom do you wait?"  # from a parent to its rank
COMPUTING = "computing "  # begins the place of a rank that waits for no rank and uses the processor
_OBSERVED = 0.6  # seconds in which a rank looks at its own use of the processor
_BUSY = 0.04  # seconds of the processor's time that a rank which waits does not use meanwhile

LAB = os.path.dirname(os.path.dirname(__file__))


def stack_file(folder: str, rank: int) -> str:
    """Return the file to which a rank writes its stacks."""
    return os.path.join(folder, f"stack-{rank}")


def answer(folder: str, rank: int) -> None:
    """Write where this rank's threads are, and for whom it waits (lab/ranks/waiting.py)."""
    with suppress(Exception):
        write_wait(folder, rank)
    begin = COMPUTING + "\n" if current_wait() is None and _is_busy() else ""
    with suppress(OSError), open(stack_file(folder, rank), "a") as file:
        file.write(begin)
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def _is_busy() -> bool:
    """Return whether this process computes, and does not sleep or wait for the network."""
    used, deadline = time.process_time() + _BUSY, time.monotonic() + _OBSERVED
    while time.process_time() < used and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.process_time() >= used


def ask(ranks: Mapping[int, Any], folder: str, seconds: float) -> dict[int, str]:
    """Ask ranks, forked processes, and return where each is: "at file.py:12 in f: its line ...".

    The place of a rank that waits for no rank but computes begins with "computing at".
    Wait at most `seconds`, half of them before the signal is sent.
    """
    paths = {rank: stack_file(folder, rank) for rank in ranks}
    for rank, one in ranks.items():
        with suppress(OSError):
            open(paths[rank], "w").close()  # removes what an earlier question has brought
            one.pipe.send_bytes(ASK)
    _await(paths.values(), seconds / 2)
    for rank, one in ranks.items():
        if not _is_complete(paths[rank]):
            with suppress(OSError):
                os.kill(one.process.pid, signal.SIGUSR2)
    _await(paths.values(), seconds / 2)
    return {rank: where(path) for rank, path in paths.items()}


def _await(paths: Iterable[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(map(_is_complete, paths)):
        time.sleep(0.01)


def _is_complete(path: str) -> bool:
    """Return whether faulthandler has written all frames: the main thread's outermost one comes last."""
    text = ""
    with suppress(OSError), open(path) as file:
        text = file.read()
    return text.endswith((" in <module>\n", "...\n"))  # it leaves out what is deeper than 100 frames


def where(path: str) -> str:
    """Return where the threads of a rank are, from a stack file: the main thread first.

    A thread is described by its lines outside of libraries, innermost first. Threads that have none, such as
    those of torch, are left out, and so are those whose first function is called BACKGROUND.
    """
    text = ""
    with suppress(OSError), open(path) as file:
        text = file.read()
    # faulthandler lists the main thread last and each thread's innermost frame first.
    stacks = text.split("hread 0x")[:0:-1]
    main, *others = [_lines(stack) for stack in stacks] or [""]
    also = "".join(f"\n      its other thread is {lines}" for lines in others if lines)
    doing = COMPUTING if text.startswith(COMPUTING) else ""
    return doing + (main or "before its function was called") + also


def _lines(stack: str) -> str:
    frames = [(f, int(n), fn) for f, n, fn in re.findall(r'File "(.+)", line (\d+) in (.+)', stack)]
    library = (os.path.dirname(os.__file__), LAB, "<frozen", "<string>")
    own = [frame for frame in frames if not frame[0].startswith(library) and "site-packages" not in frame[0]]
    if not own or own[-1][2] == BACKGROUND:
        return ""
    # The line that waits with the functions that called it, and those of the caller that led there.
    chain = own if len(own) <= 8 else [*own[:5], *own[-3:]]
    lines = [f"{file}:{line} in {fn}: {linecache.getline(file, line).strip()}" for file, line, fn in chain]
    return f"at {lines[0]}" + "".join(f"\n      called from {line}" for line in lines[1:])
