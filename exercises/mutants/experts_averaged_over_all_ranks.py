"""The loss falls, and an expert learns from the gradients of other experts, which lie on the other ranks."""

TARGET = "expert_parallel.train_moe.ExpertParallel.finish_gradient_sync"
KILLER = "tests.expert_parallel.test_equivalence.test_an_expert_is_averaged_over_its_replicas_only"
CAUSE = "which ranks hold the same one"
SYMPTOM = "With a copy of each expert on one rank in two, the loss falls more slowly than on one process."


def mutant(self) -> None:
    from expert_parallel.train_moe import average_gradients

    average_gradients([*self.dense, *self.experts], self.groups.everyone)
    for parameter in self.experts:
        if parameter.requires_grad:
            parameter.grad /= self.groups.num_expert_ranks
