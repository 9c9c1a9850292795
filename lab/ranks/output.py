"""Show what ranks print, tagged and coloured by rank."""

import sys
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
