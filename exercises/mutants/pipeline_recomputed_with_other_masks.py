"""With recomputation and dropout gradients are wrong: the second forward draws other dropout masks."""

from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.forward"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_recomputation_drops_out_the_same"
CAUSE = "must draw the same mask"


def mutant(self, microbatch: int, x, target=None):
    if self.recompute:
        y = checkpoint(self._compute, x, target, None, use_reentrant=False, preserve_rng_state=False)
    else:
        y = self._compute(x, target, None)
    self._begun[microbatch] = x, get_gradient_edge(y) if y.requires_grad else None
    return y.detach()
