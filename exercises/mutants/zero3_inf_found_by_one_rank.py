"""With a GradScaler one rank skips a step that another takes, so their shards and scales drift apart."""

import torch

TARGET = "training.gradient_part.GradientPart.unscale"
KILLER = "tests.zero.test_zero3_torch_tools.test_a_grad_scaler_skips_a_step_on_all_ranks_or_on_none"
CAUSE = "what only that rank has seen"


def mutant(parts, found_inf, inverse_scale) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse_scale)
