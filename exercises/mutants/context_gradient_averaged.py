"""Training is slow with SGD, the slower the more ranks: the terms of a gradient are averaged, not summed."""

from comm.collectives import all_reduce

TARGET = "context_parallel.parallel_model.ContextParallel.finish_gradient_sync"
KILLER = "tests.context_parallel.test_mutant_killers.test_the_terms_of_all_ranks_add_up_to_each_gradient"
CAUSE = "divided by their number once too often"
SYMPTOM = "Training is slow with SGD, and the slower the more ranks there are. With Adam nothing is noticed."


def mutant(self) -> None:
    for parameter in self.module.parameters():
        if parameter.grad is not None:
            all_reduce(parameter.grad, op="mean", group=self.group)
