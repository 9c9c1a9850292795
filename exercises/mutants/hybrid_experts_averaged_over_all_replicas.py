"""Experts learn from the tokens of other experts: their gradients are averaged over all replicas."""

from torch import nn

from data_parallel.train_bucket_overlap import BucketDataParallel
from expert_parallel.groups import ExpertGroups
from hybrid_parallel.expert_axis import ReplicatedExperts, experts_of

TARGET = "hybrid_parallel.expert_axis.ReplicatedExperts.__init__"
KILLER = (
    "tests.hybrid_parallel.test_context_and_experts.test_experts_divided_among_replicas_equal_one_process"
)
CAUSE = "which replicas hold the same one"
SYMPTOM = "With divided experts the loss falls more slowly than on one process, and experts become alike."


def mutant(self: ReplicatedExperts, module: nn.Module, groups: ExpertGroups, pattern: str | None) -> None:
    self._experts, self._ranks = experts_of(module), groups.num_expert_ranks
    own = set(self._experts)
    dense = [parameter for parameter in module.parameters() if parameter not in own]
    both = (dense, groups.everyone), (self._experts, groups.everyone)
    self._parts = [BucketDataParallel(nn.ParameterList(p), group, pattern) for p, group in both]
