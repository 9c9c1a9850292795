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

All the rest is as in stage 1 (train_zero1.py, with its parts and its source). This class replaces three of
its methods: a bucket's gradients get memory (`_move_in`) and lose it (`_wait_for_oldest`), and at most two
are in flight (`_launch`). In the training loop each microbatch ends with `finish_gradient_sync`.
"""

from typing import Any

import torch
from torch import nn

from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.memory import MemoryReport
from training.guard import guarded
from training.run import Run
from zero.memory import owned, shares_of
from zero.train_zero1 import Args, Bucket, ZeroOptimizer

MOST_IN_FLIGHT = 2  # without a limit, all buckets would wait in memory for a slow link


@guarded
class ZeroGradientOptimizer(ZeroOptimizer):
    """Trains a model as ZeroOptimizer does; each rank also keeps only its shard of the gradients.

    With several microbatches, call `finish_gradient_sync()` after each backward: gradients add up in shards.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            bucket.gradients.untyped_storage().resize_(0)

    def _move_in(self, parameter: nn.Parameter, bucket: Bucket) -> None:
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
    run = Run(cluster, args, "zero2")
    model = run.model()
    optimizer_class, options = args.optimizer_class()
    optimizer = ZeroGradientOptimizer(
        model.parameters(), optimizer_class, bucket_mb=args.bucket_mb, **options
    )
    should_own = owned(2, shares_of(model, optimizer.parameter_shards), args.states)
    memory = MemoryReport(model, optimizer, should_own)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        total = torch.zeros((), device=cluster.device)
        for part_x, part_y in microbatches(x, y, args.grad_acc_steps):
            loss = loss_of(model(part_x), part_y, run.num_targets)
            loss.backward()
            optimizer.finish_gradient_sync()  # there is no memory for the gradients of several microbatches
            total += loss.detach()
        if args.clip is not None:
            optimizer.clip_grad_norm_(args.clip)
        optimizer.step()
        run.record(total)
    sent = optimizer.traffic(reductions=args.grad_acc_steps, is_clipped=args.clip is not None)
    run.finish(model, traffic=sent, **memory.fields())


if __name__ == "__main__":
    start(main, Args)
