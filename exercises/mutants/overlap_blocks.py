"""Overlap is as slow as naive: each hook waits for its all-reduce, so the backward waits too."""

from comm.collectives import all_reduce

TARGET = "data_parallel.train_overlap.OverlapDataParallel._launch"
KILLER = "tests.data_parallel.test_overlap.test_overlap_hides_most_of_its_communication_and_naive_nothing"
CAUSE = "does something wait before the computing goes on"


def mutant(self, i: int) -> None:
    all_reduce(self._trained[i].grad, op="mean", group=self.group, pattern=self.pattern)
