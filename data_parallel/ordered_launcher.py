"""Launch operations in a fixed order, each as soon as it and all before it are ready.

      order      0   1   2   3   4          ready so far: 0, 2, 3
                 ■   □   ■   ■   □          launched: 0; when 1 is ready, 1, 2 and 3 are launched

Gradients become ready in the order of the backward, which may differ between ranks: perhaps only some
inputs take a branch, or versions of a library differ. But ranks pair their collectives by the order of the
calls. In another order they would reduce different gradients together.
"""

from collections.abc import Callable


class OrderedLauncher:
    """Calls `launch(i)` for i = 0, 1, ... `count` - 1, each when i and all numbers before it are ready."""

    def __init__(self, count: int, launch: Callable[[int], None]) -> None:
        self._count, self._launch = count, launch
        self._ready: set[int] = set()
        self._launched = 0

    def ready(self, i: int) -> None:
        """Mark number i as ready, and launch what can be launched."""
        self._ready.add(i)
        while self._launched in self._ready:
            self._launched += 1
            self._launch(self._launched - 1)

    def missing(self) -> list[int]:
        """Return the numbers that are not ready, in order."""
        return [i for i in range(self._count) if i not in self._ready]

    def is_ready(self, i: int) -> bool:
        """Return whether number i is ready."""
        return i in self._ready

    def reset(self) -> None:
        """Make no number ready, and start with number 0 again."""
        self._ready.clear()
        self._launched = 0
