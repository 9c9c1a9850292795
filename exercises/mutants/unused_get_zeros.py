"""Weight decay shrinks parameters that no rank uses: their gradients are zeros instead of none."""

from data_parallel.train_bucket_overlap import BucketDataParallel

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel"
KILLER = "tests.data_parallel.test_equivalence.test_a_parameter_has_a_gradient_on_all_ranks_or_on_none"
CAUSE = "Zeros stand where no gradient should be"


class mutant(BucketDataParallel):
    def finish_gradient_sync(self) -> None:
        super().finish_gradient_sync()
        for parameter, bucket in self._bucket_of.items():
            if parameter.grad is None:
                parameter.grad = bucket.views[parameter]
