"""On a slow link stage 2's peak is that of stage 1: buckets fill faster than they are sent."""

from data_parallel.gradient_shard import GradientShard

TARGET = "data_parallel.gradient_shard.OnTheWay.start"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_at_most_three_buckets_of_gradients_are_alive"


def mutant(self, gradients: GradientShard) -> None:
    gradients.reduce()
    self._started.append(gradients)
