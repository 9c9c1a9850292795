"""Run work that communicates on a thread of its own, while the caller's thread computes.

      caller's thread    run(a, ...) ── run(b, ...) ── backward ──── wait
      the thread         |======= a =======|======= b =======|

An asynchronous collective (collectives.py) also leaves the caller free. But where several collectives belong
together, with arithmetic in between, a thread has to take the next one when the one before it has ended. The
ranks must give their work in the same order. Meanwhile, nothing else may use the same group.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from comm.wire.staging import handover_of
from lab.trace.timeline import span


class BackgroundThread:
    """Runs the work that it is given, in that order; after an error it runs none, and raises the error again.

    `name` is that of the thread, and of its work in a timeline.
    """

    def __init__(self, name: str) -> None:
        self._name, self._threads = name, ThreadPoolExecutor(1, thread_name_prefix=name)
        self._error: BaseException | None = None

    def run(self, work: Callable[[], object], tensor: Tensor) -> "BackgroundWork":
        """Return at once; the thread calls `work()`, which reads and writes the tensor."""
        handover = handover_of([tensor]) or nullcontext()
        return BackgroundWork(self._threads.submit(self._call, work, handover, tensor.nbytes))

    def _call(self, work: Callable[[], object], handover: AbstractContextManager[None], size: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            with handover, span(self._name, self._name, bytes=size):
                work()
        except BaseException as error:
            self._error = error
            raise


class BackgroundWork:
    """Work of a thread that runs or waits. `wait()` blocks until its end, and raises its error."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        if self._future.done():
            return self._future.result()
        with span("wait", "wait"):
            self._future.result()
