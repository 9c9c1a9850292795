"""Experts learn faster than all else on a mesh: their gradients are sums over the ranks that share them."""

from hybrid_parallel.expert_axis import ReplicatedExperts

TARGET = "hybrid_parallel.expert_axis.ReplicatedExperts.finish_gradient_sync"
KILLER = (
    "tests.hybrid_parallel.test_context_and_experts.test_experts_divided_among_replicas_equal_one_process"
)
CAUSE = "as many times too large as ranks share the experts"
SYMPTOM = "With SGD the more ranks share the experts, the sooner they diverge; with Adam nothing is noticed."


def mutant(self: ReplicatedExperts) -> None:
    for part in self._parts:
        part.finish_gradient_sync()
