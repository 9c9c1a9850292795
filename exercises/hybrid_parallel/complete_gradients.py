"""Completing the gradients of a step. Write `HybridParallel._one_backward` of hybrid_parallel/hybrid.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/hybrid.py yet: it contains
the solution. All that you need is in this file, in the notebook and in the hints.

You may use:

    self._in_one_stage(x: Tensor, y: Tensor) -> Tensor
    self._through_stages(x: Tensor, y: Tensor) -> Tensor
    self.data: Any
    self.in_precision() -> contextlib.AbstractContextManager[Any]
        Compute in 16 bits inside of the block, if the sizes say so; parameters stay as they are.
    self.pipeline: Pipeline | None
    self.terms: TensorParallel | None
        Adds up gradients.

Check it with `python -m exercises check complete_gradients`.
"""

from torch import Tensor


def _one_backward(self, x: Tensor, y: Tensor) -> Tensor:
    """Add the gradients of this replica's batch, complete them, and return the replica's mean loss.

    `self.pipeline`, `self.data` and `self.terms` are objects of lessons 4, 2 and 3, or None where
    there is nothing to complete. Their method `finish_gradient_sync()` completes the gradients: over
    the stages of a pipeline, over the replicas, which differ along the data and context axes, and
    over the ranks of the tensor axis. With ZeRO, `self.data` leaves this rank's shard of a gradient
    only, so the order of the three matters. `self._through_stages(x, y)` runs all microbatches
    through a pipeline, and `self._in_one_stage(x, y)` runs them without one: both add the gradients
    of this rank, and return the loss, which in a pipeline is zero on all stages but the last. Only
    they run in `with self.in_precision():`.
    """
    raise NotImplementedError(
        "Completing the gradients of a step is not written yet: `HybridParallel._one_backward` has no body."
    )
