"""Replicas drift apart, and layers that are divided get mixed up: the mean is taken over the tensor axis."""

from typing import Any

from data_parallel.train_bucket_overlap import BucketDataParallel
from hybrid_parallel.expert_axis import ReplicatedExperts
from hybrid_parallel.hybrid import HybridParallel, OptimizerClass
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

TARGET = "hybrid_parallel.hybrid.HybridParallel._replicate"
KILLER = "tests.hybrid_parallel.test_equivalence.test_replicas_of_divided_tokens_equal_one_process"
CAUSE = "never pass from one group of ranks to the other"


def mutant(self: HybridParallel, optimizer_class: OptimizerClass, options: dict[str, Any]) -> None:
    group, pattern, zero = self.mesh.replicas, self.pattern, self.sizes.zero
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
        self.data.group = self.mesh.tensor
    else:
        self.data = None
    self.optimizer = optimizer_class(self.module.parameters(), **options)
