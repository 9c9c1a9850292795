"""Without what only Unix has, everything can be imported and a script runs as one process.

Python and the libraries stay Unix's: this shows what our files do where they find nothing of it, no more.
"""

import contextlib
import ctypes
import importlib
import io
import json
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lab.cluster import Cluster
from lab.ranks import run_ranks

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("lab", "comm", "data_parallel", "tensor_parallel", "pipeline_parallel"),
    *("context_parallel", "expert_parallel", "hybrid_parallel"),
)
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "multiprocessing.forkserver")
FUNCTIONS = {
    select: ("poll", "epoll", "POLLIN", "POLLOUT", "POLLRDHUP"),
    signal: ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "pause", "pthread_sigmask"),
    os: ("fork", "killpg", "setpgid", "getppid", "register_at_fork", "pidfd_open"),
}
_CDLL = ctypes.CDLL


def cdll(name: str | None, *args: Any, **options: Any) -> Any:
    if name is None:
        raise TypeError("on Windows a library has a name")
    return _CDLL(name, *args, **options)


@contextlib.contextmanager
def windows() -> Iterator[None]:
    """Take away what Windows lacks, and all modules of ours that have been imported with it."""
    ours = [name for name in sys.modules if name.partition(".")[0] in FOLDERS]
    with mock.patch.dict(sys.modules), pytest.MonkeyPatch.context() as patch:
        for name in ours:
            del sys.modules[name]
        for name in MODULES:
            patch.setitem(sys.modules, name, None)
        for owner, names in FUNCTIONS.items():
            for name in names:
                patch.delattr(owner, name)
        patch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
        patch.setattr(ctypes, "CDLL", cdll)
        patch.setattr(sys, "platform", "win32")
        yield


def test_everything_is_imported_a_script_runs_as_one_process_and_run_ranks_says_what_it_lacks():
    def on_windows(cluster: Cluster) -> tuple[str, str, dict[str, Any]]:
        out = io.StringIO()
        with windows(), contextlib.redirect_stdout(out):
            for folder in FOLDERS:
                for path in sorted((ROOT / folder).glob("[!_]*.py")):
                    importlib.import_module(f"{folder}.{path.stem}")
            get = importlib.import_module
            with pytest.raises(get("lab.launch.errors").WorkbookError) as refusal:
                get("lab.ranks").run_ranks(print, 2)
            with get("comm.script").joined() as cluster:
                script, arguments = get("data_parallel.train_naive"), get("training.arguments")
                script.main(cluster, arguments.Args(steps=2, size="tiny", batch_size=2, json=True))
                transport = get("comm.wire.transport").chosen_transport()
        return str(refusal.value), transport, json.loads(out.getvalue())

    ((refusal, transport, summary),) = run_ranks(on_windows, 1, backend=None)
    assert refusal == "run_ranks forks its ranks, and Windows has no fork; run it in WSL 2."
    assert transport == "gloo"
    assert summary["replicas_equal"] is True and summary["steps"] == 2
