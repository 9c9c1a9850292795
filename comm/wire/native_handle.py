"""A handle for an operation of torch.distributed, with the interface of work_queue.Handle."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from comm.errors import CommError
from comm.wire.wire import peer_trouble
from lab.trace import timeline


class NativeHandle:
    """An operation of torch.distributed in flight, with the interface of comm.wire.work_queue.Handle."""

    def __init__(self, op: str, work: dist.Work | None, finish: Callable[[], object] | None = None) -> None:
        self._op, self._work, self._finish = op, work, finish
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def wait(self) -> None:
        """Block until the operation has ended. Raise CommError if a peer has gone, or at the timeout."""
        if self._work is not None:
            with timeline.span("wait", "wait"):
                self.end()

    def end(self) -> None:
        """Do what `wait()` does, but record no span "wait": the caller records the operation itself."""
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
        """Return whether `wait()` would return at once."""
        return self._work is None or self._work.is_completed()

    def when_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` when the operation has ended: on torch's thread, or at once if it has.

        Where torch offers no callback (gloo's reduce-scatter), `wait()` calls it.
        """
        if self._work is None:
            callback(None)
            return
        try:
            future = self._work.get_future()
        except RuntimeError:  # gloo's reduce-scatter has none: wait() does its last part, a slice
            self._callbacks.append(callback)
        else:
            future.add_done_callback(lambda future: callback(_error_of(self._op, future)))

    def _call_back(self, error: BaseException | None) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)


def failed(op: str, error: RuntimeError) -> CommError:
    """Return torch's error as a CommError that names this rank and, if known, the peer."""
    if isinstance(error, CommError):
        return error
    return CommError(f"{op} (torch): rank {dist.get_rank()} gave up: {peer_trouble(str(error), 'a peer')}.")


def _error_of(op: str, future: torch.futures.Future) -> CommError | None:
    try:
        future.value()
    except RuntimeError as error:
        return failed(op, error)
    return None
