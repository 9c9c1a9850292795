"""Parameters that a rank does not use in this step move on in the direction of an earlier one."""

from data_parallel.train_bucket_overlap import BucketDataParallel

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel"
KILLER = "tests.data_parallel.test_equivalence.test_who_uses_a_parameter_may_change_from_step_to_step"


class mutant(BucketDataParallel):
    def finish_gradient_sync(self) -> None:
        for parameter, bucket in self._bucket_of.items():
            if parameter.grad is None:
                parameter.grad = bucket.views[parameter]  # whatever is in it
        super().finish_gradient_sync()
