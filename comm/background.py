"""Run work that communicates on a thread of its own, while the caller's thread computes.

      caller's thread    run(a, ...) ── run(b, ...) ── backward ──── wait
      the thread         |======= a =======|======= b =======|

An asynchronous collective (collectives.py) also leaves the caller free. But where several collectives belong
together, with arithmetic in between, a thread has to take the next one when the one before it has ended. The
ranks must give their work in the same order. Meanwhile, nothing else may use the same group.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

from torch import Tensor

from comm.wire.staging import handover_of
from lab.launch.ending import complete_at_end
from lab.launch.errors import WorkbookError
from lab.trace.timeline import span


class BackgroundThread:
    """Runs the work that it is given, in that order; after an error it runs none, and raises the error again.

    `name` is that of the thread, and of its work in a timeline. A process completes the work before it ends
    well, and after an error ends without it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise WorkbookError(
            "A thread that sends cannot be copied or saved: copy or save the module it works for."
        )

    def run(self, work: Callable[[], object], tensor: Tensor) -> "BackgroundWork":
        """Return at once; the thread calls `work()`, which reads and writes the tensor."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=[self._queue], name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
            complete_at_end(self)
        future: Future[None] = Future()
        handover = handover_of([tensor]) or nullcontext()
        self._queue.put(partial(self._call, work, handover, tensor.nbytes, future))
        return BackgroundWork(future)

    def join(self) -> None:
        """Wait for the end of the work so far, and of the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _call(
        self,
        work: Callable[[], object],
        handover: AbstractContextManager[None],
        size: int,
        future: Future[None],
    ) -> None:
        try:
            if self._error is not None:
                raise self._error
            with handover, span(self._name, self._name, bytes=size):
                work()
            future.set_result(None)
        except BaseException as error:
            self._error = error
            future.set_exception(error)


def _serve(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := queue.get()) is not None:
        call()
        del call  # or it would keep the thread's owner, and what it has worked on, until the next work


class BackgroundWork:
    """Work of a thread that runs or waits. `wait()` blocks until its end, and raises its error."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        if self._future.done():
            return self._future.result()
        with span("wait", "wait"):
            self._future.result()
