"""torch's clip_grad_norm_ has no effect in stage 2, and a different effect on each rank in stage 1."""

from torch import Tensor

TARGET = "zero.shard_guard.ShardGuard.placeholder"
KILLER = (
    "tests.zero.test_sharded_clipping.test_torchs_own_clipping_is_refused_and_the_optimizers_own_is_right"
)
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(self, parameter: Tensor) -> Tensor | None:
    return parameter.grad
