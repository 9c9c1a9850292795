"""An error in the last stage of an evaluation is raised there only, and the others hang in the next step."""

TARGET = "pipeline_parallel.failure.SharedFailure.end_step_on_all"
KILLER = (
    "tests.pipeline_parallel.test_forward_only.test_an_error_in_the_last_stage_reaches_the_ranks_before_it"
)
CAUSE = "Every rank must say the same"


def mutant(self) -> Exception | None:
    return self.end_step()
