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
the backward, as in stage 1.

Parameters are views of flat buckets, and the inner optimizer updates this rank's shard of them, as in stage
1 (the picture is in train_zero1.py). What differs is where a gradient lives until it is sent (`_view`),
that only its shard is kept (`_wait_for_oldest`), and that every microbatch sends its gradients (`no_sync`).

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comm.collectives import Group, Work, all_gather, reduce_scatter
from comm.script import start
from data_parallel.flat import ParameterBucket
from data_parallel.guard import replace_hook
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.timeline import span
from zero.run import BucketedZeroArgs, ZeroRun
from zero.sharded_optimizer import ShardedOptimizer

MOST_IN_FLIGHT = 2  # without a limit, all buckets would wait in memory for a slow link


class ZeroGradientOptimizer(ShardedOptimizer):
    """Trains as train_zero1.ZeroOptimizer does, with the same arguments; no gradient stays in the model."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        group: Group = None,
        pattern: str | None = None,
        bucket_mb: float = 4.0,
        first_mb: float = 0.25,
        **defaults: Any,
    ) -> None:
        self._bucket: dict[Tensor, ParameterBucket] = {}  # of each parameter
        self._filling: dict[ParameterBucket, Tensor] = {}  # buckets that miss a gradient
        self._views: dict[Tensor, Tensor] = {}  # the places of gradients that they miss
        self._in_flight: deque[tuple[ParameterBucket, Tensor, Tensor, Work]] = deque()
        self._shards: dict[ParameterBucket, Tensor] = {}  # of the gradients: what this rank keeps
        caps = first_mb, bucket_mb
        super().__init__(params, optimizer_class, defaults, group, pattern, caps, self._reduce_scatter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train these parameters, too. Torch's constructor calls it; later, all ranks must call it."""
        for bucket in self._divide(param_group):
            for parameter in bucket.flat.parameters:
                self._bucket[parameter] = bucket
                replace_hook(parameter, self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Run as a hook in the backward: move the gradient into its bucket, which may now be complete."""
        if not self._has_arrived(parameter):
            return
        if parameter in self._arrivals:  # a second backward inside one no_sync(): send the rest of the first
            self._complete_buckets()
        self._view(parameter).copy_(parameter.grad)
        parameter.grad = self._guard.placeholder(parameter) if self._steps.is_synchronising else None
        self._arrivals.add(parameter)

    def _view(self, parameter: Tensor) -> Tensor:
        """Return the parameter's place in its bucket, which gets its memory with its first gradient."""
        bucket = self._bucket[parameter]
        if bucket not in self._filling:
            full = self._filling[bucket] = torch.empty_like(bucket.full)
            full[bucket.flat.numel - bucket.flat.padding :].zero_()
            self._views |= zip(bucket.flat.parameters, bucket.flat.views(full), strict=True)
        return self._views.pop(parameter)  # no reference may keep the bucket's memory

    def _reduce_scatter(self, bucket: ParameterBucket) -> None:
        """Start the reduce-scatter of a complete bucket, when fewer than two others are in flight."""
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._wait_for_oldest()
        full = self._filling.pop(bucket)
        shard = full.new_empty(bucket.flat.shard_numel)
        with span(bucket.name, "launch", lane="launches", bytes=full.nbytes):
            handle = reduce_scatter(
                shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern
            )
        self._in_flight.append((bucket, full, shard, handle))

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduce-scatter, and add its shard to that of earlier microbatches."""
        bucket, _, shard, handle = self._in_flight.popleft()  # the last reference to the full bucket
        handle.wait()
        self._shards[bucket] = self._shards[bucket].add_(shard) if bucket in self._shards else shard

    def _complete_buckets(self) -> None:
        """Send what no hook has sent: gradients that came after the backward, or zeros. Wait for all."""
        for parameter in self._arrivals.missing():
            if self._has_unsent_gradient(parameter):
                self._view(parameter).copy_(parameter.grad)
                parameter.grad = None
            else:
                self._view(parameter).zero_()
            self._arrivals.add(parameter)
        while self._in_flight:
            self._wait_for_oldest()
        self._arrivals.reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run all backwards but the last one inside: their gradients are sent, and add up in the shards."""
        with super().no_sync():
            yield
            self._complete_buckets()

    def finish_gradient_sync(self) -> None:
        """Give each piece its part of the mean gradient, or none where no rank used the parameter."""
        if self._steps.is_synced:
            return
        self._complete_buckets()
        used = self._agree_on_used()
        for bucket in self.buckets:
            self._give_gradients(bucket, self._shards[bucket], used)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard of the parameters, and gather the shards of all ranks."""
        result = None if closure is None else closure()
        if not self._steps.is_synced:
            self.finish_gradient_sync()
        self._before_step()
        self.inner.step()
        self.gather_parameters()
        return result

    def gather_parameters(self) -> None:
        """Collect the shards of all ranks in `bucket.full` on every rank."""
        handles = [
            all_gather(bucket.full, bucket.shard, group=self.group, async_op=True, pattern=self.pattern)
            for bucket in self.buckets
        ]
        for handle in handles:
            handle.wait()

    def _drop_gradients(self) -> None:
        """End a backward that no step has followed: send what other ranks wait for, and free the shards."""
        if self._arrivals:
            self._complete_buckets()
        self._shards.clear()


def main(cluster: Cluster, args: BucketedZeroArgs) -> None:
    run = ZeroRun(cluster, args, "zero2")
    model = run.model()
    optimizer = ZeroGradientOptimizer(
        model.parameters(), run.optimizer_class, pattern=run.pattern, bucket_mb=args.bucket_mb, **run.options
    )
    memory = run.memory(2, model, optimizer, [bucket.flat for bucket in optimizer.buckets])
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            parts = microbatches(*run.batch(step), args.grad_acc_steps)
            with run.step() as record:
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
                record.loss = run.mean_loss(total)
            run.expect_traffic(optimizer.traffic_per_step(args.grad_acc_steps, args.clip is not None))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, **memory.finish(as_json=args.json))


if __name__ == "__main__":
    start(main, BucketedZeroArgs)
