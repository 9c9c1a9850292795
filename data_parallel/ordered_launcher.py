"""Launch operations in a fixed order, each as soon as it and all before it are ready.

      order      0   1   2   3   4          ready so far: 0, 2, 3
                 ■   □   ■   ■   □          launched: 0; when 1 is ready, 1, 2 and 3 are launched

Gradients become ready in the order of the backward, which may be another one on another rank: only some
inputs take a branch, or the versions of a library differ. Collectives must start in the same order on all
ranks, or each meets another one's message. A fixed order costs nothing where it is also the usual one.
"""

from collections.abc import Callable


class OrderedLauncher:
    """Calls `launch(i)` for i = 0, 1, ... `count` - 1, each when it and all before it have been ready."""

    def __init__(self, count: int, launch: Callable[[int], None]) -> None:
        self._count, self._launch = count, launch
        self._ready: set[int] = set()
        self._launched = 0

    def ready(self, i: int) -> None:
        """Tell that number i is ready."""
        self._ready.add(i)
        while self._launched in self._ready:
            self._launched += 1
            self._launch(self._launched - 1)

    def missing(self) -> list[int]:
        """Return the numbers that have not been ready, in order."""
        return [i for i in range(self._count) if i not in self._ready]

    def is_ready(self, i: int) -> bool:
        """Return whether number i has been ready since the last reset."""
        return i in self._ready

    def reset(self) -> None:
        """Begin with number 0 again."""
        self._ready.clear()
        self._launched = 0
