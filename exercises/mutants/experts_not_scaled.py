"""Experts learn faster than all else: the more ranks share them, the larger are their gradients."""

TARGET = "expert_parallel.train_moe.ExpertParallel.finish_gradient_sync"
KILLER = "tests.expert_parallel.test_equivalence.test_two_ranks_have_the_gradients_of_one_process"
CAUSE = "sum over ranks that should be a mean"
SYMPTOM = "With SGD experts diverge when many ranks share them, and with Adam the loss looks normal."


def mutant(self) -> None:
    from expert_parallel.train_moe import average_gradients

    average_gradients(self.dense, self.groups.everyone)
    average_gradients(self.experts, self.groups.replicas)
