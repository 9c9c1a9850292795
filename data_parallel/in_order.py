"""Start things in a fixed order, each as soon as it and all before it are ready.

      order      0   1   2   3   4          ready so far: 0, 2, 3
                 ■   □   ■   ■   □          started: 0; when 1 is ready, 1, 2 and 3 start

Gradients become ready in whatever order the backward takes, and on another rank it may be another one: a
branch that only some inputs take, a different version of a library. Collectives must start in the same
order on all ranks, or they meet the wrong partner. A fixed order costs nothing where it is also the usual
one.
"""

from collections.abc import Callable


class InOrder:
    """Calls `start(i)` for i = 0, 1, ... `count` - 1, each when it and all before it have been ready."""

    def __init__(self, count: int, start: Callable[[int], None]) -> None:
        self._count, self._start = count, start
        self._ready: set[int] = set()
        self._started = 0

    def ready(self, i: int) -> None:
        """Number i is ready."""
        self._ready.add(i)
        while self._started in self._ready:
            self._started += 1
            self._start(self._started - 1)

    def missing(self) -> list[int]:
        """Those that have not been ready, in order."""
        return [i for i in range(self._count) if i not in self._ready]

    def is_ready(self, i: int) -> bool:
        """Whether number i has been ready since the last reset."""
        return i in self._ready

    def reset(self) -> None:
        """Begin anew with number 0."""
        self._ready.clear()
        self._started = 0
