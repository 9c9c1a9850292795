"""Stop training in an orderly way when somebody asks for it: finish the step, save the state, and end.

    with StopRequest() as stop:
        for step in range(steps):
            forward_backward_and_update(step)
            if stop.requested:
                save(directory, state)
                break

      SIGINT     Ctrl-C: the user asks
      SIGTERM    make, a container engine or a scheduler asks, and kills the process a moment later
      SIGUSR1    a scheduler asks some minutes before the time limit, and starts the job again

The signal reaches the ranks of a job in different steps. They must agree on the last step, for example by an
all-reduce of `exit_code`: otherwise one rank waits in a collective for another that has left.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from lab.launch.errors import Stopped

# The terminal sends Ctrl-C to all ranks, and then a launcher forwards it to them again.
FORWARDED_SECONDS = 1.0
FROM_SCHEDULER = getattr(signal, "SIGUSR1", None)  # None on Windows
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([FROM_SCHEDULER] if FROM_SCHEDULER else []))
NOTICE = b"\nstopping after this step; a second Ctrl-C stops at once\n"
SCHEDULER_NOTICE = b"\nstopping after this step, because the scheduler asks for it\n"


class StopRequest:
    """Handle SIGINT, SIGTERM and SIGUSR1 in a `with` block, and restore the previous handlers at its end.

    `requested` becomes True at the first signal. `exit_code` is then Stopped.BY_SCHEDULER after SIGUSR1, and
    Stopped.BY_USER, which is greater, after the others. A SIGINT or SIGTERM more than `FORWARDED_SECONDS`
    after the first of them raises KeyboardInterrupt; an earlier one counts as the same signal.

    A rank that waits in a collective reacts when the collective returns. Outside of the main thread the block
    does nothing. If a launcher has blocked SIGUSR1, the block receives one that was sent before its start.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._requested_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._was_blocked = False

    @property
    def requested(self) -> bool:
        return self.exit_code > 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
            if FROM_SCHEDULER:
                mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [FROM_SCHEDULER])
                self._was_blocked = FROM_SCHEDULER in mask
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            # None means a handler that was not set from Python. Python cannot restore it.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        if self._was_blocked:
            # Threads that began in the block do not block it, so it would end the process now.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        by_user = signum != FROM_SCHEDULER
        if by_user and self.exit_code == Stopped.BY_USER:
            if time.monotonic() - self._requested_at > FORWARDED_SECONDS:
                raise KeyboardInterrupt
        elif by_user or not self.requested:
            self.exit_code = Stopped.BY_USER if by_user else Stopped.BY_SCHEDULER
            self._requested_at = time.monotonic()
            # Not print: the signal may have interrupted a print, which holds the lock of the buffer.
            with suppress(OSError):
                os.write(2, NOTICE if by_user else SCHEDULER_NOTICE)
