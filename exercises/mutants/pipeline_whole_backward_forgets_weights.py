"""Stages with whole backwards do not learn in a table that splits others': all forwards put weights off."""

TARGET = "pipeline_parallel.stage_runner.AutogradRunner.backward"
KILLER = "tests.pipeline_parallel.test_mutant_killers.test_whole_backwards_may_stand_beside_split_ones"


def mutant(self, microbatch: int, dy):
    return self.backward_input(microbatch, dy)
