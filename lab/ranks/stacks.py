"""Find out where ranks are stuck, or still computing: which line each of their threads has reached.

A parent asks a rank by its pipe, and a thread of the rank answers by a file. Where C code keeps Python's lock
(the GIL), no thread can answer. Such a rank is sent a signal, at which it prints its stack. It is the last
resort: reading the stack of a thread that runs meanwhile can end in a segmentation fault.
"""

import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.ranks.waiting import Wait, chain, current_wait
from lab.trace.ledger import LEDGER

BACKGROUND = "in_background"  # names the function of a thread that only serves the rank's other threads
ASK = b"Where are you, and for whom do you wait?"  # from a parent to its rank
COMPUTING = "computing "  # begins the place of a rank that waits for no rank and uses the processor
_SILENT = "in C code, or too slow to answer: it has printed its line"
_OBSERVED = 0.4  # seconds in which a rank looks at its own use of the processor
_BUSY = 0.04  # seconds of the processor's time that a rank which waits does not use meanwhile

LAB = os.path.dirname(os.path.dirname(__file__))

Place = tuple[str, int, str]  # file, line, function


def answer(folder: str, rank: int) -> None:
    """Write for whom this rank waits (waiting.py), whether it computes, and where its threads are."""
    wait = None
    with suppress(Exception):
        wait = current_wait()
    is_computing = wait is None and _is_busy()
    frames, main = sys._current_frames(), threading.main_thread().ident
    stacks = [
        [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_stack(start)
        ]
        for _, start in sorted(frames.items(), key=lambda item: item[0] != main)
    ]
    new = _file(folder, rank).with_suffix(".new")
    with suppress(OSError):
        new.write_bytes(pickle.dumps((wait, is_computing, stacks, LEDGER.total())))
        new.replace(_file(folder, rank))  # now it is complete


def _is_busy() -> bool:
    """Return whether this process computes, and does not sleep or wait for the network."""
    used, deadline = time.process_time() + _BUSY, time.monotonic() + _OBSERVED
    while time.process_time() < used and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.process_time() >= used


def ask(ranks: Mapping[int, Any], folder: str, seconds: float) -> tuple[dict[int, str], dict[int, Wait]]:
    """Ask ranks where each is, "at file.py:12 in f: its line ...", and who waits for whom, for `seconds`.

    The place of a rank that waits for no rank but computes begins with "computing at". Threads without a line
    outside of libraries, or whose first function is called BACKGROUND, are left out.
    """
    answers = _answers(ranks, folder, seconds)
    places: dict[int, str] = {}
    waits: dict[int, Wait] = {}
    for rank, one in ranks.items():
        if rank not in answers:
            places[rank] = _SILENT
            with suppress(OSError):
                os.kill(one.process.pid, signal.SIGUSR2)
            continue
        wait, is_computing, stacks, _ = answers[rank]
        main, *others = map(_lines, stacks)
        also = "".join(f"\n      its other thread is {lines}" for lines in others if lines)
        doing = COMPUTING if is_computing else ""
        places[rank] = doing + (main or "before its function was called") + also
        if wait is not None:
            waits[rank] = wait
    return places, waits


def deadlock(ranks: Mapping[int, Any], folder: str, seconds: float) -> dict[int, Any] | None:
    """Return for whom each rank waits and what it has sent, if all wait and some in a cycle, else None.

    Two equal results some time apart show a deadlock: meanwhile no rank has sent anything.
    """
    answers = _answers(ranks, folder, seconds)
    waits = {rank: answer[0] for rank, answer in answers.items() if answer[0] is not None}
    if not waits or waits.keys() != ranks.keys():
        return None
    cycle = chain(waits)
    is_closed = waits[cycle[-1]].peer == cycle[0]
    return {rank: (waits[rank], answers[rank][3]) for rank in ranks} if is_closed else None


def _answers(ranks: Mapping[int, Any], folder: str, seconds: float) -> dict[int, Any]:
    """Ask ranks, and return what those have written (`answer`) that are fast enough."""
    files = {rank: _file(folder, rank) for rank in ranks}
    for rank, one in ranks.items():
        files[rank].unlink(missing_ok=True)  # the answer to an earlier question
        with suppress(OSError):
            one.pipe.send_bytes(ASK)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(file.exists() for file in files.values()):
        time.sleep(0.01)
    return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}


def _file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


def _lines(stack: list[Place]) -> str:
    library = (os.path.dirname(os.__file__), LAB, "<frozen", "<string>")
    own = [place for place in stack if not place[0].startswith(library) and "site-packages" not in place[0]]
    if not own or own[-1][2] == BACKGROUND:
        return ""
    # The line that waits with the functions that called it, and those of the caller that led there.
    chain = own if len(own) <= 8 else [*own[:5], *own[-3:]]
    lines = [f"{file}:{line} in {fn}: {linecache.getline(file, line).strip()}" for file, line, fn in chain]
    return f"at {lines[0]}" + "".join(f"\n      called from {line}" for line in lines[1:])
