"""torch's own work under way, with the interface of the handles of comm.transport.work_queue."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.transport.wire import peer_trouble
from lab import timeline


class NativeHandle:
    """torch's own work under way, with the interface of comm.transport.work_queue.Handle."""

    def __init__(self, op: str, work: dist.Work | None, finish: Callable[[], object] | None = None) -> None:
        self._op, self._work, self._finish = op, work, finish
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def wait(self) -> None:
        """Block until the operation has ended; raises CommError when a peer is gone or the time is up."""
        if self._work is not None:
            with timeline.span("wait", "wait"):
                self.end()

    def end(self) -> None:
        """As `wait()`, on a thread that nobody would miss meanwhile."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            failure = failed(self._op, error)
            self._call_back(failure)
            raise failure from error
        if self._finish is not None:
            self._finish()
        self._call_back(None)

    def is_completed(self) -> bool:
        """True once `wait()` would not block."""
        return self._work is None or self._work.is_completed()

    def when_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Have `callback(error)` called when it has ended: on torch's thread, or at once if it has.

        Where torch cannot tell (gloo's reduce-scatter), it is called by `wait()`.
        """
        if self._work is None:
            callback(None)
            return
        try:
            future = self._work.get_future()
        except RuntimeError:  # gloo's reduce-scatter has none: its last part, a slice, is done in wait()
            self._callbacks.append(callback)
        else:
            future.add_done_callback(lambda future: callback(_error_of(self._op, future)))

    def _call_back(self, error: BaseException | None) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)


def failed(op: str, error: RuntimeError) -> CommError:
    """The sentence for an error of torch's."""
    if isinstance(error, CommError):
        return error
    return CommError(f"{op} (torch): rank {dist.get_rank()} gave up: {peer_trouble(str(error), 'a peer')}.")


def _error_of(op: str, future: torch.futures.Future) -> CommError | None:
    try:
        future.value()
    except RuntimeError as error:
        return failed(op, error)
    return None
