"""A GradScaler skips a step only on the rank that has found an infinity: the other stages take the step."""

TARGET = "pipeline_parallel.stage_gradient.refuse_norms_of_a_stage"
KILLER = (
    "tests.pipeline_parallel.test_plausible_use"
    ".test_torchs_own_clipping_and_grad_scalers_are_refused_on_all_ranks_and_a_single_norm_is_not"
)
FAILS_WITH = "DID NOT RAISE"
CAUSE = "check that must refuse it"


def mutant(parameters) -> None:
    pass
