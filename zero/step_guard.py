"""Refuse calls of a sharded optimizer in an order that would lose gradients.

      zero_grad ─► backward, all but the last in no_sync ─► finish_gradient_sync ─► step ─► zero_grad ─► ...

All ranks run the same program, so they make the same mistake, and each rank notices it without the others.
"""

from data_parallel.no_sync import NoSync
from lab.launch.errors import WorkbookError
from zero.shard_guard import ANOTHER_BACKWARD


class StepGuard(NoSync):
    """Tracks which of a step's calls have been made.

    `is_synced` is True once the shards have their gradients.
    """

    def __init__(self) -> None:
        self.is_synced = False
        self._has_gradients = False
        self._is_over, self._is_stale = False, False  # a step() since zero_grad(); a backward after that
        self._is_unfinished = False  # a backward outside of no_sync(), and no finish_gradient_sync() since

    def before_gradient(self, is_second: bool) -> None:
        """Raise WorkbookError if a gradient cannot be added now. `is_second`: an earlier one has arrived."""
        if self.is_synced and not self._is_over:
            raise WorkbookError("A backward came after finish_gradient_sync(): call zero_grad() in between.")
        self._is_stale, self.is_synced = self._is_over, False
        if is_second and self.is_synchronising:
            raise WorkbookError(ANOTHER_BACKWARD)
        self._is_unfinished |= self.is_synchronising

    def drops_a_backward(self) -> bool:
        """Return whether this microbatch follows a backward whose gradients were sent and then dropped.

        If the program had kept them, autograd would have raised an error when it added to a placeholder.
        """
        is_dropped = self._is_unfinished and not self.is_synchronising
        self._is_unfinished &= not is_dropped
        return is_dropped

    def before_sync(self) -> None:
        """Raise WorkbookError if the gradients are those of a backward after the step."""
        if self._is_stale:
            raise WorkbookError("A backward came after step(): call the optimizer's zero_grad() in between.")

    def synced(self, has_gradients: bool) -> None:
        """Note that the shards have their gradients; `has_gradients`: any rank has used a parameter."""
        self._has_gradients, self.is_synced, self._is_unfinished = has_gradients, True, False

    def before_step(self) -> None:
        """Raise WorkbookError if there is nothing to train with."""
        if not self._has_gradients:
            raise WorkbookError(
                "step() came, and no rank has a gradient of any parameter: call zero_grad() before the "
                "backward, and make the optimizer again if the model's parameters were replaced since."
            )
        self._is_over = True

    def begin(self) -> None:
        """Note that the gradients of the last step are dropped."""
        self.is_synced = self._is_over = self._is_stale = self._is_unfinished = False
