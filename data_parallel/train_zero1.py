"""ZeRO, stage 1: every rank trains with all gradients, but keeps the optimizer's state of its own shard only.

      rank 0   gradients ─┐                 ┌─► shard 0 ─► optimizer, state 0 ─┐            ┌─► parameters
      rank 1   gradients ─┼─ reduce-scatter ┼─► shard 1 ─► optimizer, state 1 ─┼ all-gather ┼─► parameters
      rank 2   gradients ─┘      mean       └─► shard 2 ─► optimizer, state 2 ─┘            └─► parameters

In plain data parallel every rank computes the same update and holds the same optimizer state, AdamW's two
numbers for each parameter. One rank is enough to do it, if it sends the others the outcome. An all-reduce
*is* a reduce-scatter and an all-gather; here the optimizer stands in between, so it costs no more to send:

      memory    P + G + O/n                  traffic   2 (n-1)/n P
      P, G, O: bytes of parameters, gradients and optimizer state; AdamW in fp32: 4, 4 and 8 for each

Gradients live in full in flat buckets, whose reduce-scatter starts while the backward still computes.
After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from comm.collectives import Work, reduce_scatter
from comm.script import start
from data_parallel.flat import Bucket
from data_parallel.sharded_optimizer import ShardedOptimizer
from data_parallel.zero_run import BucketedZeroArgs, ZeroRun
from lab.cluster import Cluster
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span


class ZeroOptimizer(ShardedOptimizer):
    """Stage 1. Gradients add up in flat buckets, whose shard of this rank becomes the mean."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._gradients: dict[Bucket, Tensor] = {}
        self._views: dict[Bucket, list[Tensor]] = {}
        self._in_flight: list[Work] = []
        super().__init__(*args, **options)

    def add_bucket(self, bucket: Bucket) -> None:
        self._gradients[bucket] = torch.zeros_like(bucket.full)
        self._views[bucket] = bucket.flat.views(self._gradients[bucket])

    def keep(self, bucket: Bucket, position: int) -> None:
        """A new gradient moves into its place once, and adds up there."""
        parameter, view = bucket.flat.parameters[position], self._views[bucket][position]
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view

    def keep_zero(self, bucket: Bucket, position: int) -> None:
        self._views[bucket][position].zero_()

    def launch(self, bucket: Bucket) -> None:
        full = self._gradients[bucket]
        with span(bucket.name, "launch", lane="launches", bytes=full.nbytes):
            handle = reduce_scatter(
                full[bucket.flat.mine], full, op="mean", group=self.group, async_op=True, pattern=self.pattern
            )
        self._in_flight.append(handle)

    def wait(self) -> None:
        for handle in self._in_flight:
            handle.wait()
        self._in_flight.clear()

    def gradient_shard(self, bucket: Bucket) -> Tensor:
        return self._gradients[bucket][bucket.flat.mine]


def main(cluster: Cluster, args: BucketedZeroArgs) -> None:
    run = ZeroRun(cluster, args, "zero1")
    model = run.model()
    optimizer = ZeroOptimizer(
        model.parameters(), run.optimizer_class, pattern=run.pattern, bucket_mb=args.bucket_mb, **run.options
    )
    memory = run.memory(1, model, optimizer, [bucket.flat for bucket in optimizer.buckets])
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
        run.sent(optimizer.traffic_per_step(1, args.clip is not None))
    run.finish(model, **memory.finish(as_json=args.json))


if __name__ == "__main__":
    start(main, BucketedZeroArgs)
