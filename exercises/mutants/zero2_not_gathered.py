"""In stage 2 replicas drift apart: each rank sees the updates of its own shard only."""

TARGET = "zero.train_zero2.ZeroGradientOptimizer.step"
KILLER = "tests.zero.test_zero_mutant_killers.test_after_a_step_all_ranks_compute_with_the_new_parameters"
CAUSE = "new parameters gathered"


def mutant(self, closure=None):
    result = None if closure is None else closure()
    if not self._steps.is_synced:
        self.finish_gradient_sync()
    self._before_step()
    self.inner.step()
    return result
