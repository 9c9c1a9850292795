"""Compressed gradients are reduced, and each rank steps with its own: the replicas drift apart."""

from torch import Tensor

TARGET = "data_parallel.bucket_layout.Bucket.from_wire"
KILLER = "tests.data_parallel.test_bucket_overlap.test_a_compressed_gradient_is_close_for_half_the_bytes"


def mutant(self, wire: Tensor) -> None:
    pass
