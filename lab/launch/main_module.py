"""Keep the caller's script from running again in the processes that multiprocessing starts."""

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

from lab.launch.errors import WorkbookError, reason

_LONGEST_PATH = 103  # bytes of a Unix socket's path on macOS; Linux has 107
_SOCKET = "/pymp-12345678/listener-12345678"  # where multiprocessing makes one in the temporary folder


def start_forkserver(modules: Sequence[str]) -> None:
    """Start the process from which multiprocessing forks, unless it runs; it imports the modules.

    Its socket is in /tmp if TMPDIR makes the path too long. Raise WorkbookError if /tmp cannot be written.
    """
    from multiprocessing.forkserver import ensure_running  # not on Windows

    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config and len(os.fsencode(tempfile.gettempdir() + _SOCKET)) > _LONGEST_PATH:
        try:
            config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        except OSError as error:
            why = reason(error)
            raise WorkbookError(f"TMPDIR is too long for a socket, and /tmp is no choice: {why}.") from error
        Finalize(None, shutil.rmtree, (config["tempdir"], True), exitpriority=-100)
    with main_module_hidden():
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        ensure_running()


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every rank."""
    main = sys.modules["__main__"]
    saved: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        yield
    finally:
        del main.__spec__
        main.__dict__.update(saved)
