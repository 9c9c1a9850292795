"""ZeRO, stage 1: every rank trains with all gradients, but keeps the optimizer's state of its own shard only.

      rank 0   gradients ─┐                 ┌─► shard 0 ─► optimizer, state 0 ─┐            ┌─► parameters
      rank 1   gradients ─┼─ reduce-scatter ┼─► shard 1 ─► optimizer, state 1 ─┼ all-gather ┼─► parameters
      rank 2   gradients ─┘      mean       └─► shard 2 ─► optimizer, state 2 ─┘            └─► parameters

In plain data parallel every rank computes the same update and holds the same optimizer state, AdamW's two
numbers for each parameter. One rank is enough to do it, if it sends the others the outcome. An all-reduce
*is* a reduce-scatter and an all-gather; here the optimizer stands in between, so it costs no more to send:

      memory    P + G + O/n                  traffic   2 (n-1)/n P
      P, G, O: bytes of parameters, gradients and optimizer state; AdamW in fp32: 4, 4 and 8 for each

The cycle is one class, read from top to bottom: a gradient moves into its bucket (`_on_gradient`), a complete
bucket is reduce-scattered while the backward computes on (`_reduce_scatter`), the shards become gradients
(`finish_gradient_sync`), the inner optimizer updates its shard and all shards are gathered (`step`). How flat
buckets are divided is in flat.py; state dicts, clipping and refusals are in sharded_optimizer.py.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comm.collectives import Group, Work, all_gather, reduce_scatter
from comm.script import start
from data_parallel.flat import ParameterBucket
from data_parallel.guard import replace_hook
from data_parallel.sharded_optimizer import ShardedOptimizer
from data_parallel.zero_run import BucketedZeroArgs, ZeroRun
from lab.cluster import Cluster
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span


class ZeroOptimizer(ShardedOptimizer):
    """Trains a model with an optimizer of an elementwise class, each rank of `group` a shard of it.

    `params` are a model's parameters, or groups of them, in any form torch's optimizers take. They become
    rank 0's; buffers, which an optimizer does not see, do not (DDP's do, before every forward). Call
    `finish_gradient_sync()` after the (last) backward, or let `step()` do it. Several microbatches: divide
    each one's loss by their number, and run all but the last inside `no_sync()`. Learning rate schedulers and
    torch.amp.GradScaler work as with the class itself.

    What it does not do: leave gradients in the model (clip with `clip_grad_norm_` here; torch's own is
    refused), reduce sparse ones, load another rank's state, or train parameters that are unfrozen, replaced
    (give them to `add_param_group`) or cast after it was made: the next `finish_gradient_sync` refuses them.
    """

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
        self._gradients: dict[ParameterBucket, Tensor] = {}  # of each bucket, in full
        self._views: dict[Tensor, Tensor] = {}  # each parameter's place in these
        self._in_flight: list[Work] = []
        caps = first_mb, bucket_mb
        super().__init__(params, optimizer_class, defaults, group, pattern, caps, self._reduce_scatter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train these parameters, too; all ranks call it, between two steps. torch calls it for the first."""
        for bucket in self._divide(param_group):
            self._gradients[bucket] = torch.zeros_like(bucket.full)
            views = bucket.flat.views(self._gradients[bucket])
            self._views |= zip(bucket.flat.parameters, views, strict=True)
            for parameter in bucket.flat.parameters:
                replace_hook(parameter, self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Take a gradient that the backward has computed; with it, a bucket may be complete."""
        if not self._accepts(parameter):
            return
        if parameter in self._launches:  # a second one: the first, which the program has dropped, was sent
            self._complete_buckets()
        self._move_in(parameter)
        if self._steps.is_synchronising:
            parameter.grad = self._guard.taken(parameter)
            self._launches.arrived(parameter)

    def _move_in(self, parameter: Tensor) -> None:
        """Copy a new gradient into its bucket; autograd will add the next microbatch's to it there."""
        view = self._views[parameter]
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view

    def _reduce_scatter(self, bucket: ParameterBucket) -> None:
        """Start to make this rank's shard of a complete bucket the mean over ranks."""
        full = self._gradients[bucket]
        shard = full[bucket.flat.mine]
        with span(bucket.name, "launch", lane="launches", bytes=full.nbytes):
            handle = reduce_scatter(
                shard, full, op="mean", group=self.group, async_op=True, pattern=self.pattern
            )
        self._in_flight.append(handle)

    def _complete_buckets(self) -> None:
        """Count gradients that this rank does not have as zero, and wait until all buckets are reduced."""
        for parameter in self._launches.missing():
            if self._has_unsent_gradient(parameter):
                self._move_in(parameter)
            else:
                self._views[parameter].zero_()
            self._launches.arrived(parameter)
        for handle in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self._launches.reset()

    def finish_gradient_sync(self) -> None:
        """After the backward: give each piece the mean gradient of what this rank owns.

        A parameter that only some ranks used counts as zero on the others; one that no rank used has no
        gradient, and the optimizer leaves it alone.
        """
        self._complete_buckets()
        used = self._agree_on_used()
        for bucket in self.buckets:
            self._hand_over(bucket, self._gradients[bucket][bucket.flat.mine], used)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard of the parameters, with its shard of the state; gather all shards."""
        result = None if closure is None else closure()
        if not self._steps.is_synced:
            self.finish_gradient_sync()
        self._before_step()
        self.inner.step()
        self.gather_parameters()
        return result

    def gather_parameters(self) -> None:
        """Make each rank's parameters the shards of all ranks."""
        handles = [
            all_gather(bucket.full, bucket.shard, group=self.group, async_op=True, pattern=self.pattern)
            for bucket in self.buckets
        ]
        for handle in handles:
            handle.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step before, on the model and on the pieces."""
        if (
            self._launches
        ):  # a backward that no step follows, as the generator's through a GAN's discriminator
            self._complete_buckets()
        self._forget_gradients()


def main(cluster: Cluster, args: BucketedZeroArgs) -> None:
    run = ZeroRun(cluster, args, "zero1")
    model = run.model()
    optimizer = ZeroOptimizer(
        model.parameters(), run.optimizer_class, pattern=run.pattern, bucket_mb=args.bucket_mb, **run.options
    )
    memory = run.memory(1, model, optimizer, [bucket.flat for bucket in optimizer.buckets])
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
            run.expect_traffic(optimizer.traffic_per_step(1, args.clip is not None))
            run.stop_if_asked(step)
    run.finish(model, **memory.finish(as_json=args.json))


if __name__ == "__main__":
    start(main, BucketedZeroArgs)
