"""Replicas drift apart: compressed gradients are averaged, but each rank steps with its own gradients."""

TARGET = "data_parallel.wire_format.RoundedAllReduce.wait"
KILLER = "tests.data_parallel.test_bucket_overlap.test_compressed_gradients_are_close_and_take_half_the_bytes"
CAUSE = "the average is not what is used"


def mutant(self) -> None:
    self._work.wait()
