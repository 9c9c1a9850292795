"""With many microbatches training diverges: gradients are too large by the number of microbatches."""

from typing import Any

from pipeline_parallel.stage_runner import AutogradRunner

TARGET = "pipeline_parallel.stage_runner.AutogradRunner"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_the_loss_is_the_mean_over_all_microbatches"
CAUSE = "where a mean is due"


class mutant(AutogradRunner):
    def __init__(self, stage: Any, microbatches: int, *args: Any, **options: Any) -> None:
        super().__init__(stage, 1, *args, **options)
