"""The printed loss is noisy and too small: it has only the last microbatch's part of the mean."""

from pipeline_parallel.actions import FORWARD
from pipeline_parallel.messages import sent_by

TARGET = "pipeline_parallel.executor.Executor._hand_over"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_the_loss_is_the_mean_over_all_microbatches"
CAUSE = "only the last one used"
SYMPTOM = "The printed loss is noisy and too small, and training is right."


def mutant(self, action, made) -> None:
    message = sent_by(action, self.last_stage)
    if message is not None and made is not None:
        self._ready[message] = made
    elif made is not None and action.kind == FORWARD:
        self._results = {action.microbatch: made}
    elif made is not None:
        self._input_gradients[action.microbatch] = made
