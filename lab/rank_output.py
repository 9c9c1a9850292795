"""Show what ranks print, tagged and coloured by rank, and where a rank is stuck."""

import linecache
import os
import re
import sys
from contextlib import suppress
from typing import TextIO

_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93)


def print_tagged(rank: int, line: str, stream: TextIO) -> None:
    """Print a line of a rank with its tag, in colours on a terminal and in a notebook."""
    tag = f"[rank {rank}]"
    if stream.isatty() or is_in_a_notebook():
        tag = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{tag}\033[0m"
    print(f"{tag} {line}", file=stream)


def is_in_a_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter. Having imported IPython is not enough."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def where(path: str) -> str:
    """Return where the threads of a rank are, from a stack file: the main thread first.

    A thread is described by its lines outside of libraries, innermost first. Threads that have none, such as
    those of torch, are left out.
    """
    stacks: list[str] = []
    with suppress(OSError), open(path) as file:
        # faulthandler lists the main thread last and each thread's innermost frame first.
        stacks = file.read().split("hread 0x")[:0:-1]
    main, *others = [_lines(stack) for stack in stacks] or [""]
    also = "".join(f"\n      its other thread is {lines}" for lines in others if lines)
    return (main or "before its function was called") + also


def _lines(stack: str) -> str:
    frames = [(f, int(n), fn) for f, n, fn in re.findall(r'File "(.+)", line (\d+) in (.+)', stack)]
    library = (os.path.dirname(os.__file__), os.path.dirname(__file__), "<frozen", "<string>")
    own = [frame for frame in frames if not frame[0].startswith(library) and "site-packages" not in frame[0]]
    if not own:
        return ""
    # The line that waits with the functions that called it, and those of the caller that led there.
    chain = own if len(own) <= 8 else [*own[:5], *own[-3:]]
    lines = [f"{file}:{line} in {fn}: {linecache.getline(file, line).strip()}" for file, line, fn in chain]
    return f"at {lines[0]}" + "".join(f"\n      called from {line}" for line in lines[1:])
