"""With some backwards split and others not, the stages with full backwards do not learn."""

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.backward"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_full_backwards_may_stand_beside_split_ones"
CAUSE = "is it not computed"


def mutant(self, microbatch: int, dy):
    return self.backward_input(microbatch, dy)
