"""With fp16 and a GradScaler the ranks' scales drift apart: each rank looks for inf in its own shard only."""

from torch import Tensor

TARGET = "training.gradient_part.GradientPart.of"
KILLER = "tests.zero.test_sharded_clipping.test_a_grad_scaler_skips_the_step_on_all_ranks_when_one_has_inf"
FAILS_WITH = "all_gather"  # the ranks that step wait for the one that does not
CAUSE = "what only that rank has seen"
SYMPTOM = "With fp16 and a GradScaler the ranks' scales drift apart."


def mutant(part: Tensor, group, pattern: str | None) -> Tensor:
    return part
