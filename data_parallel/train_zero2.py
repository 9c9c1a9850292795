"""ZeRO, stage 2: a gradient is needed by the rank that owns it; the others forget it as soon as it is sent.

      backward       head    block 3    block 2    block 1 ...
      bucket         [ fill ][ send  ]
                             [ fill ][ send  ]                   at most three alive at a time
      my shard            ■        ■       ■                     of each bucket, the mean over ranks

Stage 1 keeps every gradient to the end of the backward, to use an n-th of them. Here a bucket gets its
memory when its first gradient is ready, is reduce-scattered when it is full, and is gone when it has
arrived. The price is paid with several microbatches: each of them has to send its gradients.

      memory    P + G/n + O/n  (and the buckets on their way)      traffic   2 (n-1)/n P, one more (n-1)/n P
                                                                             for each further microbatch

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from comm.script import start
from data_parallel.flat import Bucket
from data_parallel.gradient_shard import GradientShard, OnTheWay
from data_parallel.sharded_optimizer import ShardedOptimizer
from data_parallel.zero_run import BucketedZeroArgs, ZeroRun
from lab.cluster import Cluster
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span


class ZeroGradientOptimizer(ShardedOptimizer):
    """Stage 2. After a backward no `param.grad` is left: what remains of the gradients are the pieces'."""

    sends_each_microbatch = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self._gradients: dict[Bucket, GradientShard] = {}
        self._on_the_way = OnTheWay(0)
        super().__init__(*args, **options)

    def add_bucket(self, bucket: Bucket) -> None:
        self._gradients[bucket] = GradientShard(
            bucket.name, bucket.flat, bucket.full.dtype, self.group, self.pattern
        )
        self._on_the_way = OnTheWay(2 * max(gradients.num_bytes for gradients in self._gradients.values()))

    def keep(self, bucket: Bucket, position: int) -> None:
        parameter = bucket.flat.parameters[position]
        self._gradients[bucket].put(position, parameter.grad)
        parameter.grad = None

    def keep_zero(self, bucket: Bucket, position: int) -> None:
        pass  # all at once, when the bucket is launched

    def launch(self, bucket: Bucket) -> None:
        self._gradients[bucket].fill_up(bucket.full.device)
        self._on_the_way.start(self._gradients[bucket])

    def wait(self) -> None:
        self._on_the_way.finish()

    def gradient_shard(self, bucket: Bucket) -> Tensor:
        shard = self._gradients[bucket].shard
        assert shard is not None
        return shard

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last microbatch. Gradients add up in the shards: each microbatch sends its own."""
        with super().no_sync():
            yield
            self._complete_buckets()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for gradients in self._gradients.values():
            gradients.clear()


def main(cluster: Cluster, args: BucketedZeroArgs) -> None:
    run = ZeroRun(cluster, args, "zero2")
    model = run.model()
    optimizer = ZeroGradientOptimizer(
        model.parameters(), run.optimizer_class, pattern=run.pattern, bucket_mb=args.bucket_mb, **run.options
    )
    memory = run.memory(2, model, optimizer, [bucket.flat for bucket in optimizer.buckets])
    for step in run.steps(model, optimizer):
        parts = microbatches(*run.batch(step), args.grad_acc_steps)
        with run.step() as this:
            optimizer.zero_grad()
            total = torch.zeros((), device=cluster.device)
            for i, (x, y) in enumerate(parts):
                is_last = i == len(parts) - 1
                with contextlib.nullcontext() if is_last else optimizer.no_sync():
                    with span("forward", "forward"), memory.forward():
                        loss = loss_of(model(x), y) / len(parts)
                    with span("backward", "backward"):
                        loss.backward()
                total += loss.detach()
            optimizer.finish_gradient_sync()
            if args.clip is not None:
                optimizer.clip_grad_norm_(args.clip)
            with span("step", "optimizer"):
                optimizer.step()
            this.loss = run.mean_loss(total)
        run.sent(optimizer.traffic_per_step(args.grad_acc_steps, args.clip is not None))
    run.finish(model, **memory.finish(as_json=args.json))


if __name__ == "__main__":
    start(main, BucketedZeroArgs)
