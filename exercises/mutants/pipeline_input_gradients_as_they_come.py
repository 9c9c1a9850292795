"""Rows of the input gradient are in the order of the backwards, not in the order of the batch."""

from pipeline_parallel.actions import FORWARD
from pipeline_parallel.messages import sent_by

TARGET = "pipeline_parallel.executor.Executor._hand_over"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_full_backwards_may_stand_beside_split_ones"
CAUSE = "rows of its microbatch"
SYMPTOM = "The gradients of a stage's input are right, but they belong to other rows of the batch."


def mutant(self, action, made) -> None:
    message = sent_by(action, self.last_stage)
    if message is not None and made is not None:
        self._ready[message] = made
    elif made is not None and action.kind == FORWARD:
        self._results[action.microbatch] = made
    elif made is not None:
        self._input_gradients[len(self._input_gradients)] = made
