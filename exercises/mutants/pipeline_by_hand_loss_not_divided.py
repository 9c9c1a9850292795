"""GPipe's gradients are too large by the number of microbatches: losses are summed, not averaged."""

from typing import Any

from pipeline_parallel.train_afab import AllForwardAllBackward

TARGET = "pipeline_parallel.train_afab.AllForwardAllBackward"
KILLER = "tests.pipeline_parallel.test_narrated.test_gpipe_by_hand_equals_one_process"
CAUSE = "where a mean is due"


class mutant(AllForwardAllBackward):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        mean, microbatches = self.loss_of, self.microbatches
        self.loss_of = lambda y, target: mean(y, target) * microbatches
