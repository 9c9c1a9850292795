"""Gradients are summed, not averaged: with SGD training diverges on many ranks, and Adam hides the error."""

from comm.collectives import all_reduce

TARGET = "data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"
CAUSE = "sum over ranks that should be a mean"
SYMPTOM = "With SGD training diverges on many ranks, and with Adam the loss looks normal."


def mutant(self) -> None:
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, op="sum", group=self.group, pattern=self.pattern)
