"""Find out where ranks are stuck, or still computing: which line each of their threads has reached.

A parent asks a rank by its pipe. A thread of the rank answers: it writes the stacks of all threads to a file.
It holds Python's lock (the GIL) meanwhile, so that no stack changes. A signal handler would not hold it, and
reading the stack of a thread that runs can end in a segmentation fault. So a rank is sent the signal only if
that thread does not answer, as when C code keeps the lock.
"""

import faulthandler
import json
import linecache
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from lab.ranks.waiting import Wait, current_wait

BACKGROUND = "in_background"  # names the function of a thread that only serves the rank's other threads
ASK = b"Where are you, and for whom do you wait?"  # from a parent to its rank
WAITING = "waits: "  # begins the line that says for whom a rank waits
COMPUTING = "computing "  # begins the place of a rank that waits for no rank and uses the processor
_OBSERVED = 0.6  # seconds in which a rank looks at its own use of the processor
_BUSY = 0.04  # seconds of the processor's time that a rank which waits does not use meanwhile

LAB = os.path.dirname(os.path.dirname(__file__))


def stack_file(folder: str, rank: int) -> str:
    """Return the file to which a rank writes its stacks."""
    return os.path.join(folder, f"stack-{rank}")


def answer(folder: str, rank: int) -> None:
    """Write for whom this rank waits (waiting.py), or that it computes, and where its threads are."""
    wait = None
    with suppress(Exception):
        wait = current_wait()
    is_computing = wait is None and _is_busy()
    with suppress(OSError), open(stack_file(folder, rank), "a") as file:
        file.write(COMPUTING + "\n" if is_computing else WAITING + json.dumps(wait and vars(wait)) + "\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def _is_busy() -> bool:
    """Return whether this process computes, and does not sleep or wait for the network."""
    used, deadline = time.process_time() + _BUSY, time.monotonic() + _OBSERVED
    while time.process_time() < used and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.process_time() >= used


def ask(ranks: Mapping[int, Any], folder: str, seconds: float) -> tuple[dict[int, str], dict[int, Wait]]:
    """Ask ranks where each is, "at file.py:12 in f: its line ...", and who waits for whom, for `seconds`.

    The place of a rank that waits for no rank but computes begins with "computing at".
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
    texts = {rank: _read(path) for rank, path in paths.items()}
    waits = {rank: _wait(text) for rank, text in texts.items()}
    places = {rank: _place(text) for rank, text in texts.items()}
    return places, {rank: Wait(**wait) for rank, wait in waits.items() if wait}


def _await(paths: Iterable[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(map(_is_complete, paths)):
        time.sleep(0.01)


def _is_complete(path: str) -> bool:
    """Return whether faulthandler has written all frames: the main thread's outermost one comes last."""
    return _read(path).endswith((" in <module>\n", "...\n"))  # it leaves out what is deeper than 100 frames


def _read(path: str) -> str:
    with suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _wait(text: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        return json.loads(text.partition("\n")[0].removeprefix(WAITING))
    return None


def _place(text: str) -> str:
    """Return where the threads of a rank are, from a stack file's text: the main thread first.

    Threads without a line outside of libraries, or whose first function is called BACKGROUND, are left out.
    """
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
