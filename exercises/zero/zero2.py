"""ZeRO 2: gradients freed as they leave. Write `ZeroGradientOptimizer._launch`,
`ZeroGradientOptimizer._move_in` and `ZeroGradientOptimizer._wait_for_oldest` of zero/train_zero2.py.

Read notebooks/06_zero_and_fsdp.ipynb first. Do not open zero/train_zero2.py yet: it has the solution.

You may use:

    MOST_IN_FLIGHT = 2

Check it with `python -m exercises check zero2`.
"""

from torch import Tensor

from zero.train_zero1 import Bucket, ZeroOptimizer
from zero.train_zero2 import MOST_IN_FLIGHT


def _launch(self, bucket: Bucket) -> None:
    """Start the reduce-scatter of a bucket, when fewer than MOST_IN_FLIGHT are in flight.

    `self._in_flight` is the deque of those that are. Stage 1's method does the rest:
    `ZeroOptimizer._launch(self, bucket)`.
    """
    raise NotImplementedError("`ZeroGradientOptimizer._launch` is not written yet.")


def _move_in(self, parameter: Tensor, bucket: Bucket) -> None:
    """Copy a gradient into its bucket, which gets memory with its first gradient.

    The storage of `bucket.gradients` has a size of 0 while it is freed, and
    `bucket.gradients.nbytes` when it has memory. The last `bucket.layout.padding` of its
    `bucket.layout.numel` numbers must be zero. Then stage 1's method does the rest:
    `ZeroOptimizer._move_in(self, parameter, bucket)`.
    """
    raise NotImplementedError("`ZeroGradientOptimizer._move_in` is not written yet.")


def _wait_for_oldest(self) -> None:
    """Wait for the oldest reduce-scatter, keep this rank's part of it, and free the memory.

    `self._in_flight` has pairs (bucket, handle). After the wait the slice `bucket.layout.mine`
    of `bucket.gradients` is the mean over ranks. `bucket.layout.add_gradient(bucket.shards,
    gradient)` gives each of the bucket's shards its part of it, or adds it to that of earlier
    microbatches.
    """
    raise NotImplementedError("`ZeroGradientOptimizer._wait_for_oldest` is not written yet.")
