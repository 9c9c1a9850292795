"""One operation at a time in each group, in the order they were called: the handle and its thread.

Two collectives of one group that run at once may interleave differently on two ranks and wait for each other
for ever. So a group has one queue. An asynchronous operation runs on the group's communication thread;
a synchronous one runs on the caller's when the queue is empty, and takes its turn when not.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from comm.errors import CommError, Mismatch
from comm.transport.wire import Group, group_of
from lab.timeline import span

IDLE_SECONDS = 10.0  # after which a communication thread ends; a group that is gone leaves none behind


class Handle:
    """An operation under way. `wait()` blocks until its result is there and raises what it raised."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_raised = False  # by wait()
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def wait(self) -> None:
        """Block until the operation has ended; raises the operation's own error."""
        if not self._done.is_set():
            with span("wait", "wait"):
                self._done.wait()
        if self._error is not None:
            self._is_raised = True
            raise self._error

    def is_completed(self) -> bool:
        """True once `wait()` would not block."""
        return self._done.is_set()

    def when_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Have `callback(error)` called when the operation has ended: on its thread, or at once if it has."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self._error)

    @property
    def unraised_mismatch(self) -> Mismatch | None:
        """The Mismatch with which the operation has ended, until `wait()` raises it."""
        return self._error if isinstance(self._error, Mismatch) and not self._is_raised else None

    def run(self) -> None:
        try:
            self._job()
        except BaseException as error:
            self._error = error
        finally:
            self._job = _nothing  # frees the tensors that the job holds
            with self._lock:
                self._done.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback(self._error)


class GroupQueue:
    """The operations of one group, first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[Handle] = deque()
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.sequence = 0
        self.link_free_at = 0  # comm.transport.slow_link's, nanoseconds
        # After a mismatch, what was sent early may lie about or still be moving: from then on nothing is
        # sent early, and the memory is kept, for a connection stops for ever when it loses it in mid-message.
        self.has_stale_messages = False
        self.stale_messages: list[object] = []
        self._mismatched: Callable[[], Handle | None] = _nothing  # a weak reference to the last one

    def submit(self, job: Callable[[int], None], async_op: bool) -> Handle:
        """Queue `job(sequence)`; with `async_op` False, return after it has ended (raising its error)."""
        with self._changed:
            self.sequence += 1
            number = self.sequence
            handle = Handle(lambda: self._do(job, number))
            here = not async_op and not self._busy and not self._waiting
            if here:
                self._busy = True
            else:
                self._waiting.append(handle)
                self._start_thread()
                self._changed.notify_all()
        if here:
            self._run(handle)
        if not async_op:
            handle.wait()
        return handle

    def _do(self, job: Callable[[int], None], number: int) -> None:
        try:
            job(number)
        except Mismatch:
            raise
        except CommError as error:
            # A peer may have left because of a mismatch that this rank's caller has not been told of yet.
            earlier = self._mismatched()
            if earlier is not None and (mismatch := earlier.unraised_mismatch):
                raise CommError(str(mismatch)) from error
            raise

    def _run(self, handle: Handle) -> None:
        try:
            handle.run()
            if handle.unraised_mismatch:
                self._mismatched = weakref.ref(handle)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="communication", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting and not self._busy, IDLE_SECONDS):
                    if self._waiting:
                        continue  # behind a long operation of the caller's own thread
                    self._thread = None
                    return
                self._busy = True
                handle = self._waiting.popleft()
            self._run(handle)
            del handle  # or it would live, with its error's frames, until the next one comes


_queues: "weakref.WeakKeyDictionary[dist.ProcessGroup, GroupQueue]" = weakref.WeakKeyDictionary()
_queues_lock = threading.Lock()


def queue_of(group: Group) -> GroupQueue:
    """The queue that belongs to a group; it lives as long as the group."""
    with _queues_lock:
        return _queues.setdefault(group_of(group), GroupQueue())


def _nothing() -> None:
    pass
