"""Compressed gradients are reduced, and each rank steps with its own: the replicas drift apart."""

import torch.distributed as dist

from comm.collectives import all_reduce

TARGET = "data_parallel.train_bucket_overlap.BucketDataParallel._launch"
KILLER = "tests.data_parallel.test_bucket_overlap.test_a_compressed_gradient_is_close_for_half_the_bytes"


def mutant(self, k: int) -> None:
    bucket = self.buckets[k]
    wire, op = bucket.flat, "mean"
    if self._wire_dtype is not None:
        wire, op = (wire / dist.get_world_size(self.group)).to(self._wire_dtype), "sum"
    handle = all_reduce(wire, op=op, group=self.group, async_op=True, pattern=self.pattern)
    self._in_flight.append((bucket, bucket.flat, handle))
