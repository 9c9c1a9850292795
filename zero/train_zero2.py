"""ZeRO, stage 2: a rank frees a gradient as soon as it is sent, and keeps an n-th of the gradients.

      backward       head    block 3    block 2    block 1 ...
      bucket         [ fill ][ send   ]
                             [ fill ][ send   ]
                                     [ fill ][ send   ]         usually at most three buckets in memory
      own shards                      ■       ■       ■         of the mean gradients

Stage 1 has memory for every gradient, although a rank uses only an n-th of them. Here a bucket gets its
memory when its first gradient is computed, and is reduce-scattered when it is complete. At most two are in
flight: before a third one starts, the oldest is waited for, its shard is kept, and its memory is freed.
With several microbatches that has a price, because each of them sends its gradients.

      memory of a rank    P + (G + O)/n, and the buckets that are being filled and sent
      bytes sent          (n-1)/n (G + P) in a step, and (n-1)/n G more for each further microbatch
      P, G, O: bytes of parameters, gradients and optimizer state, on n ranks

A parameter that is unused, or whose gradient comes late, holds up its bucket and those after it, because
all ranks must send the buckets in one order. In the worst case all buckets stay in memory until the end of
the backward, as in stage 1. The memory that is freed is that of the flat tensor's storage: the tensor and
its views stay, and are valid again when the storage gets memory for the next backward.

All the rest, the training loop too, is as in stage 1 (train_zero1.py, with its parts and its source). This
class replaces four of its methods: a bucket's gradients get memory (`_move_in`) and lose it
(`_wait_for_oldest`), at most two are in flight (`_launch`), and every microbatch sends (`no_sync`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from comm.script import start
from lab.cluster import Cluster
from zero import train_zero1
from zero.train_zero1 import Args, Bucket, ZeroOptimizer

MOST_IN_FLIGHT = 2  # without a limit, all buckets would wait in memory for a slow link


class ZeroGradientOptimizer(ZeroOptimizer):
    """Trains a model as ZeroOptimizer does; each rank also keeps only its shard of the gradients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            bucket.gradients.untyped_storage().resize_(0)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Send the gradients of this microbatch, too: they add up in the shards."""
        yield
        self.finish_gradient_sync()
        self._is_synchronised = False  # the next microbatch adds to the shards

    def _move_in(self, parameter: Tensor, bucket: Bucket) -> None:
        """Copy a gradient into its bucket, which gets memory with its first gradient."""
        memory = bucket.gradients.untyped_storage()
        if memory.size() == 0:
            memory.resize_(bucket.gradients.nbytes)
            bucket.gradients[bucket.layout.numel - bucket.layout.padding :] = 0  # the padding
        ZeroOptimizer._move_in(self, parameter, bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket, when fewer than MOST_IN_FLIGHT are in flight."""
        if len(self._in_flight) == MOST_IN_FLIGHT:
            self._wait_for_oldest()
        ZeroOptimizer._launch(self, bucket)

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduce-scatter, keep this rank's shard of it, and free the bucket's memory."""
        bucket, work = self._in_flight.popleft()
        work.wait()
        bucket.layout.add_gradient(bucket.shards, bucket.gradients[bucket.layout.mine].clone())
        bucket.gradients.untyped_storage().resize_(0)


def main(cluster: Cluster, args: Args) -> None:
    train_zero1.main(cluster, args, stage=2, sharded=ZeroGradientOptimizer)


if __name__ == "__main__":
    start(main, Args)
