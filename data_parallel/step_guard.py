"""Refuse the calls of a sharded optimizer that come in an order in which gradients would be lost.

      zero_grad ─► backward, all but the last in no_sync ─► finish_gradient_sync ─► step ─► zero_grad ─► ...

A program makes its mistakes on all ranks, so each rank notices them for itself.
"""

import contextlib
from collections.abc import Iterator

from data_parallel.shard_guard import ANOTHER_BACKWARD
from lab.errors import WorkbookError


class StepGuard:
    """Knows which of a step's calls have come.

    `is_synchronising` is False inside `no_sync()`; `is_synced` is True once the shards have their gradients.
    """

    def __init__(self) -> None:
        self.is_synchronising, self.is_synced = True, False
        self._has_gradients = False
        self._is_over, self._is_stale = False, False  # stepped since zero_grad(); and then another backward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark backwards whose gradients are not the last ones of the step."""
        self.is_synchronising = False
        try:
            yield
        finally:
            self.is_synchronising = True

    def before_gradient(self, is_second: bool) -> None:
        """Raise WorkbookError if a gradient cannot be added now; `is_second`: to one that is being sent."""
        if self.is_synced and not self._is_over:
            raise WorkbookError("A backward came after finish_gradient_sync(): call zero_grad() in between.")
        self._is_stale, self.is_synced = self._is_over, False
        if is_second and self.is_synchronising:
            raise WorkbookError(ANOTHER_BACKWARD)

    def before_sync(self) -> None:
        """Raise WorkbookError if the gradients are those of a backward after the step."""
        if self._is_stale:
            raise WorkbookError("A backward came after step(): call the optimizer's zero_grad() in between.")

    def synced(self, has_gradients: bool) -> None:
        """Note that the shards have their gradients, where any rank has some."""
        self._has_gradients, self.is_synced = has_gradients, True

    def before_step(self) -> None:
        """Raise WorkbookError if there is nothing to train with."""
        if not self._has_gradients:
            raise WorkbookError(
                "step() came, and no rank has a gradient of any parameter: call zero_grad() before the "
                "backward, and make the optimizer again if the model's parameters were replaced since."
            )
        self._is_over = True

    def begin(self) -> None:
        """Note that the gradients of the step before are forgotten."""
        self.is_synced = self._is_over = self._is_stale = False
