"""Ranks that have other tokens of the same examples drift apart: the mean is taken along data only."""

from typing import Any

from data_parallel.train_bucket_overlap import BucketDataParallel
from hybrid_parallel.expert_axis import ReplicatedExperts
from hybrid_parallel.hybrid import HybridParallel, OptimizerClass
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel._replicate"
KILLER = (
    "tests.hybrid_parallel.test_narrated_axes."
    "test_gradients_are_means_over_the_ranks_of_the_data_and_the_context_axis"
)
CAUSE = "never pass from one group of ranks to the other"
SYMPTOM = "With a context axis the loss falls more slowly, and ranks end with different parameters."


def mutant(self: HybridParallel, optimizer_class: OptimizerClass, options: dict[str, Any]) -> None:
    group, pattern, zero = self.mesh.data, self.pattern, self.sizes.zero
    self.data: Any
    if zero in (1, 2):
        sharded = ZeroOptimizer if zero == 1 else ZeroGradientOptimizer
        parameters = self.module.parameters()
        self.data = self.optimizer = sharded(parameters, optimizer_class, group, pattern, **options)
        return
    if zero == 3:
        self.data = self.module = FullyShardedDataParallel(self.module, group, pattern=pattern)
    elif self.sizes.replicas > 1 and self.experts is not None:
        self.data = ReplicatedExperts(self.module, self.experts.groups, pattern)
    elif self.sizes.replicas > 1:
        self.data = BucketDataParallel(self.module, group, pattern)
    else:
        self.data = None
    self.optimizer = optimizer_class(self.module.parameters(), **options)
