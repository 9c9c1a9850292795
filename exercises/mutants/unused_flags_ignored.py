"""Training hangs when only some ranks use a parameter: each rank reduces the gradients that it has."""

from comm.collectives import all_reduce

TARGET = "data_parallel.train_naive.NaiveDataParallel.finish_gradient_sync"
KILLER = "tests.data_parallel.test_equivalence.test_a_parameter_has_a_gradient_on_all_ranks_or_on_none"
CAUSE = "must contribute zeros"


def mutant(self) -> None:
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, op="mean", group=self.group, pattern=self.pattern)
