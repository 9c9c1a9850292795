"""The loss does not fall: buckets are set to zero after the reduction, and with them the gradients."""

from data_parallel.train_bucket_overlap import BucketDataParallel

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel"
KILLER = "tests.data_parallel.test_equivalence.test_a_gradient_is_the_mean_over_ranks_and_not_their_sum"
CAUSE = "cleared"


class mutant(BucketDataParallel):
    def finish_gradient_sync(self) -> None:
        super().finish_gradient_sync()
        for bucket in self.buckets:
            bucket.flat.zero_()
