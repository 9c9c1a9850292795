"""Replicas drift apart, and layers that are divided get mixed up: the mean is taken over the tensor axis."""

from typing import Any

from data_parallel.train_bucket_overlap import BucketDataParallel
from hybrid_parallel.hybrid import HybridParallel, OptimizerClass

TARGET = "hybrid_parallel.hybrid.HybridParallel._replicate"
KILLER = "tests.hybrid_parallel.test_equivalence.test_replicas_of_divided_tokens"
CAUSE = "never pass from one group of ranks to the other"


def mutant(self: HybridParallel, optimizer_class: OptimizerClass, options: dict[str, Any]) -> None:
    self.data = BucketDataParallel(self.module, self.mesh.data, self.pattern)
    self.data.group = self.mesh.tensor
    self.optimizer = optimizer_class(self.module.parameters(), **options)
