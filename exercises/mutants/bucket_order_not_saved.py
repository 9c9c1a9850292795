"""A run that is resumed from a checkpoint differs in the last bits from a run without an interruption."""

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel.set_extra_state"
KILLER = "tests.data_parallel.test_bucket_overlap.test_a_resumed_run_equals_an_uninterrupted_run"
CAUSE = "the order of gradients"


def mutant(self, state: dict) -> None:
    pass
