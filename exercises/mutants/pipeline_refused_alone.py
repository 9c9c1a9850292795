"""A smaller last batch is an error on the first rank only, and the others wait until the timeout."""

TARGET = "pipeline_parallel.failure.SharedFailure.compute_unless_failed"
KILLER = "tests.pipeline_parallel.test_failure.test_a_smaller_last_batch_is_refused_by_all_ranks"
CAUSE = "Every rank must say the same"


def mutant(self, action, compute, like=None):
    return compute()
