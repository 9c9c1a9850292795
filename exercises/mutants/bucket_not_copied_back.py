"""Compressed gradients are reduced, and each rank steps with its own: the replicas drift apart."""

TARGET = "data_parallel.wire_format.RoundedAllReduce.wait"
KILLER = "tests.data_parallel.test_bucket_overlap.test_a_compressed_gradient_is_close_for_half_the_bytes"


def mutant(self) -> None:
    self._work.wait()
