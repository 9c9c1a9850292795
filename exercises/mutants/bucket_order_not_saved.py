"""A run that is resumed from a checkpoint differs in the last bits from a run without an interruption."""

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel.set_extra_state"
KILLER = "tests.data_parallel.test_bucket_overlap.test_a_run_that_goes_on_equals_one_that_never_stopped"


def mutant(self, state: dict) -> None:
    pass
