"""Gradients are wrong: ranks run the backwards in different orders and mix up the microbatches."""

from torch import Tensor

from pipeline_parallel.train_afab import AllForwardAllBackward

TARGET = "pipeline_parallel.train_afab.AllForwardAllBackward"
KILLER = "tests.pipeline_parallel.test_narrated.test_gpipe_by_hand_equals_one_process"
CAUSE = "in the same order of microbatches"
SYMPTOM = "With GPipe by hand the loss is right, and the gradients are wrong."


class mutant(AllForwardAllBackward):
    def post_receives(self, like: Tensor, peer: int):
        posted = super().post_receives(like, peer)
        return posted[::-1] if peer > self.rank else posted
