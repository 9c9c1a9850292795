"""Ctrl-C in the middle of training: finish the step, save what there is, and leave in order.

    with StopRequest() as stop:
        for step in range(steps):
            forward_backward_and_update(step)
            if stop.requested:
                save(directory, state)
                break

The signal reaches the ranks of a job in different steps. They must agree on the last one, by an all-reduce
of `requested` for instance: otherwise one waits in a collective for a rank that has left.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

# A launcher passes on the Ctrl-C that the terminal has already sent to all its ranks.
FORWARDED_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step; a second Ctrl-C stops at once\n"


class StopRequest:
    """Handles SIGINT and SIGTERM inside its `with`, and puts the previous handlers back afterwards.

    `requested` turns True at the first signal. One that comes more than `FORWARDED_SECONDS` later raises
    KeyboardInterrupt; one in between is taken for the same. Python runs handlers in the main thread only,
    and not while it is inside a C++ call: a rank that waits in a collective answers when that returns.
    In any other thread the `with` does nothing, and a stop is never requested.
    """

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            # None stands for a handler that was not set from Python, which Python cannot put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._requested_at = True, now
            # Not by print: the signal may have come in the middle of another one, whose buffer is locked.
            with suppress(OSError):
                os.write(2, NOTICE)
        elif now - self._requested_at > FORWARDED_SECONDS:
            raise KeyboardInterrupt
