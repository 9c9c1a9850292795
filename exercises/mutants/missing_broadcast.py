"""Ranks start from different random weights: the loss falls on each rank, but replicas never agree."""

from torch import nn

from comm.collectives import Group

TARGET = "data_parallel.train_naive.NaiveDataParallel.__init__"
KILLER = "tests.data_parallel.test_equivalence.test_ranks_start_from_rank_0s_parameters_and_buffers"
CAUSE = "broadcast missing"
SYMPTOM = "The loss falls on each rank, but the replicas never agree."


def mutant(self, module: nn.Module, group: Group = None, pattern: str | None = None) -> None:
    nn.Module.__init__(self)
    self.module, self.group, self.pattern = module, group, pattern
