"""Stop training at Ctrl-C in an orderly way: finish the step, save the state, and end.

    with StopRequest() as stop:
        for step in range(steps):
            forward_backward_and_update(step)
            if stop.requested:
                save(directory, state)
                break

The signal reaches the ranks of a job in different steps. They must agree on the last step, for example by an
all-reduce of `requested`: otherwise one rank waits in a collective for another that has left.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

# The terminal sends Ctrl-C to all ranks, and then a launcher forwards it to them again.
FORWARDED_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step; a second Ctrl-C stops at once\n"


class StopRequest:
    """Handle SIGINT and SIGTERM in a `with` block, and restore the previous handlers at its end.

    `requested` becomes True at the first signal. A second signal more than `FORWARDED_SECONDS` later raises
    KeyboardInterrupt; an earlier one counts as the same signal. Python runs signal handlers in the main
    thread only, and not during a C++ call: a rank that waits in a collective reacts when the collective
    returns. In another thread the block does nothing, and a stop is never requested.
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
            # None means a handler that was not set from Python. Python cannot restore it.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._requested_at = True, now
            # Not print: the signal may have interrupted a print, which holds the lock of the buffer.
            with suppress(OSError):
                os.write(2, NOTICE)
        elif now - self._requested_at > FORWARDED_SECONDS:
            raise KeyboardInterrupt
