"""Completing the gradients of a step. Write `HybridParallel.finish_gradient_sync` of
hybrid_parallel/hybrid.py.

Read notebooks/09_everything_on_one_mesh.ipynb first. Do not open hybrid_parallel/hybrid.py yet: it has the
solution.

Check it with `python -m exercises check complete_gradients`.
"""


def finish_gradient_sync(self) -> None:
    """Complete the gradients of the backwards: over stages, over replicas, over tensor ranks.

    `self.pipeline`, `self.data` and `self.terms` are objects of lessons 4, 2 and 3, or None where
    there is nothing to complete. Their method `finish_gradient_sync()` completes the gradients: over
    the stages of a pipeline, over the replicas, which differ along the data and context axes, and
    over the ranks of the tensor axis. With ZeRO, `self.data` leaves this rank's shard of a gradient
    only, so the order of the three matters.
    """
    raise NotImplementedError("`HybridParallel.finish_gradient_sync` is not written yet.")
