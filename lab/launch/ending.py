"""Complete the work of threads before a process ends well. After an error it ends at once.

A thread that Python itself waits for would keep a rank with an error alive as long as a peer is stuck, and
one that Python does not wait for (a daemon) would lose its work where a rank ends well.
"""

import os
import sys
import weakref
from multiprocessing.util import Finalize  # atexit does not work in the processes of multiprocessing
from typing import Protocol


class Worker(Protocol):
    """A daemon thread, or what gives it work."""

    def join(self) -> object:
        """Wait for the end of the work so far."""


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_process = 0  # in which the workers are


def complete_at_end(worker: Worker) -> None:
    """Let this process wait for the worker before it ends well."""
    global _process
    if _process != os.getpid():  # also in a fork of a process that has workers
        _process = os.getpid()
        _workers.clear()
        Finalize(None, _end, exitpriority=1)
    _workers.add(worker)


def complete() -> None:
    """Wait for all workers."""
    for worker in list(_workers):
        worker.join()


def abandon() -> None:
    """Wait for no worker when this process ends, because there is an error."""
    _workers.clear()


def _end() -> None:
    # Python keeps an error that ends the main thread; in a process of multiprocessing it is still raised.
    if sys.exc_info()[1] is None and getattr(sys, "last_value", None) is None:
        complete()
