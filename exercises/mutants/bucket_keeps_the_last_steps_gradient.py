"""A parameter that is not used in a step moves all the same, by its gradient of an earlier step."""

from data_parallel.train_bucket_overlap import BucketDataParallel

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel"
KILLER = (
    "tests.data_parallel.test_equivalence.test_the_ranks_that_use_a_parameter_may_change_from_step_to_step"
)
CAUSE = "one of an earlier step kept"
SYMPTOM = "A parameter that is not used in a step moves all the same."


class mutant(BucketDataParallel):
    def finish_gradient_sync(self) -> None:
        for parameter, bucket in self._bucket_of.items():
            if parameter.grad is None:
                parameter.grad = bucket.views[parameter]  # with what an earlier step left in it
        super().finish_gradient_sync()
