"""Look for messages for a short time before a rank sleeps, unless another program needs the core.

      look  let others run  look  let others run  look ...  sleep              messages come soon
      look  let others run ═══ another program's time slice ═══ look  sleep    then sleep at once for a while

To fall asleep and be woken takes longer than a small message through shared memory. So a rank looks again and
again, and lets the other ranks run in between. But a program that computes without a pause, such as a browser
or another training, then gets the core for milliseconds. A rank that sleeps instead is woken in time, because
Linux prefers those who wake up. So after such a loss a rank sleeps at once for a while, and for twice as long
if it loses the core again.
"""

import os
import threading
import time
from collections.abc import Callable

from comm.transport.work_queue import COMMUNICATION_THREAD

SLICE_SECONDS = 1e-3  # no rank that only looks for messages keeps the core for so long
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds


class Spinner:
    """Looks for messages for `seconds` at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pause = SHORTEST_PAUSE
        self._resume_at = 0.0

    def spin(self, look: Callable[[], bool], let_others_run: Callable[[], None] = os.sched_yield) -> bool:
        """Call `look` until it returns True, or until the time is over. Return whether it returned True.

        Do nothing on a communication thread: the rank computes meanwhile, and needs the core.
        """
        if threading.current_thread().name == COMMUNICATION_THREAD:
            return False
        now = time.perf_counter()
        if now < self._resume_at:
            return False
        until = now + self._seconds
        while now < until:
            before = now
            let_others_run()
            now = time.perf_counter()
            found = look()
            if now - before > SLICE_SECONDS:
                self._resume_at = now + self._pause
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                return found
            if found:
                self._pause = SHORTEST_PAUSE
                return True
        return False
