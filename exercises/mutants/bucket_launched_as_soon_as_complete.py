"""When one rank computes gradients in another order, different buckets are averaged, or all ranks hang."""

from torch import Tensor

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._on_gradient"
KILLER = "tests.data_parallel.test_equivalence.test_hooks_on_one_rank_may_fire_in_another_order"
FAILS_WITH = "The ranks do not fit together"
CAUSE = "agree on one order"
SYMPTOM = "When one rank computes gradients in another order, training hangs, or its buckets are wrong."


def mutant(self, parameter: Tensor) -> None:
    bucket = self._bucket_of[parameter]
    bucket.move_in(parameter)
    if self._guard.has_gradient(parameter) and self._guard.is_synchronising:
        self.order.see(parameter)
        bucket.missing.remove(parameter)
        if not bucket.missing:
            self._to_launch.remove(bucket)
            self._launch(bucket)
