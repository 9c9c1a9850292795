"""Ranks reduce-scatter buckets as they fill: where two ranks differ, layers get each other's gradients."""

from torch import Tensor

TARGET = "data_parallel.sharded_optimizer.ShardedOptimizer._complete"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_one_ranks_backward_may_take_another_order"


def mutant(self, parameter: Tensor) -> None:
    self._fired.add(parameter)
    bucket, _ = self._place[parameter]
    if all(piece.parameter in self._fired for piece in bucket.pieces):
        self.launch(bucket)
