"""Run the operations of a group one at a time, in the order of the calls, and return a handle for each.

      caller's thread         all_reduce(a, async_op=True) ── all_reduce(b, async_op=True) ── backward ── wait
      communication thread    |========= a =========|========= b =========|

If two collectives of a group ran at the same time, their messages could interleave differently on two ranks:
a deadlock. So each group has one queue. An asynchronous operation runs on the group's communication thread. A
synchronous one runs on the caller's thread if no other is queued or running. Else it is queued for the
communication thread too, and the caller waits.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from comm.wire.groups import Group, group_of
from lab.launch.ending import complete_at_end
from lab.trace.timeline import span

COMMUNICATION_THREAD = "communication"
IDLE_SECONDS = 10.0  # after which a communication thread ends, so that a freed group leaves none behind


class Handle:
    """An operation in flight. `wait()` blocks until its end, and raises the operation's error."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._is_done = False
        self._ended: threading.Event | None = None  # set at the end, if a thread waits for it
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def wait(self) -> None:
        if not self._is_done:
            with span("wait", "wait"):
                self._end().wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._is_done

    def _end(self) -> threading.Event:
        with self._lock:
            self._ended = self._ended or threading.Event()
            if self._is_done:
                self._ended.set()
            return self._ended

    def when_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Call `callback(error)` when the operation has ended: on its thread, or at once if it has."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self._error)

    def run(self) -> None:
        try:
            self._job()
        except BaseException as error:
            self._error = error
        finally:
            self._job = lambda: None  # frees the tensors that the job holds
            with self._lock:
                self._is_done = True
                if self._ended is not None:
                    self._ended.set()
                callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback(self._error)


class GroupQueue:
    """The operations of one group: first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[Handle] = deque()
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.sequence = 0
        self.link_users = 1  # groups that share the simulated link (slow_link.py); 0: this one needs none
        self.link_free_at = 0  # the time at which this link is free, in nanoseconds

    def submit(self, job: Callable[[int], None], async_op: bool) -> Handle:
        """Queue `job(sequence)`. Without `async_op`, wait for its end, and raise its error."""
        if torch.is_inference_mode_enabled():  # in this thread; the job may run in another
            job = torch.inference_mode()(job)
        with self._changed:
            self.sequence += 1
            number = self.sequence
            handle = Handle(lambda: job(number))
            here = not async_op and not self._busy and not self._waiting
            if here:
                self._busy = True
            else:
                self._waiting.append(handle)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name=COMMUNICATION_THREAD, daemon=True
                    )
                    self._thread.start()
                    complete_at_end(self)
                self._changed.notify_all()
        if here:
            self._run(handle)
        if not async_op:
            handle.wait()
        return handle

    def join(self) -> None:
        """Wait for the end of all operations so far."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def _run(self, handle: Handle) -> None:
        try:
            handle.run()
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting and not self._busy, IDLE_SECONDS):
                    if self._waiting:
                        continue  # the caller's thread is running a long operation
                    self._thread = None
                    return
                self._busy = True
                handle = self._waiting.popleft()
            self._run(handle)
            del handle  # or it, and its error's frames, would live until the next operation


_queues: "weakref.WeakKeyDictionary[dist.ProcessGroup, GroupQueue]" = weakref.WeakKeyDictionary()
_queues_lock = threading.Lock()


def queue_of(group: Group) -> GroupQueue:
    """Return the queue of a group. It lives as long as the group."""
    with _queues_lock:
        return _queues.setdefault(group_of(group), GroupQueue())
