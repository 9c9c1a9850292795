"""ZeRO, stage 1: every rank holds all parameters and gradients, but only an n-th of the optimizer's state.

      rank 0   gradients ─┐                 ┌─► shard 0 ─► optimizer, state 0 ─┐            ┌─► parameters
      rank 1   gradients ─┼─ reduce-scatter ┼─► shard 1 ─► optimizer, state 1 ─┼ all-gather ┼─► parameters
      rank 2   gradients ─┘      mean       └─► shard 2 ─► optimizer, state 2 ─┘            └─► parameters

In plain data parallel every rank computes the same update from the same optimizer state. It is enough if
one rank updates each number. So each of the n ranks updates an n-th of the parameters, its shard, and sends
the result to the others. An all-reduce is a reduce-scatter and then an all-gather; here the optimizer
stands between the two. So nothing hides the all-gather, but as many bytes are sent as without ZeRO:

      memory of a rank    P + G + O/n      bytes that a rank sends in a step    (n-1)/n (G + P)
      P, G, O: bytes of parameters, gradients and optimizer state; AdamW in float32: 4, 4 and 8 per parameter

The trick is in the memory (flat.py). The model's parameters become views of flat buckets, and an n-th of
each bucket is this rank's shard. Here n is 3:

      bucket.full     |     weight 0     | bias 0 |       weight 1       |     what the model computes with
      bucket.shard                     |     rank 1     |                      an n-th, which rank 1 updates
      pieces                           |w| bias 0 | w 1 |                      its part of each parameter

The inner optimizer is an ordinary one, and the pieces are its parameters. Because they share the bucket's
memory, its step writes into the shard, and an all-gather of the shards into `bucket.full` changes the
model. Gradients have a flat tensor of their own for each bucket, in the same layout.

The class reads from top to bottom: a gradient moves into its bucket (`_on_gradient`), a complete bucket is
reduce-scattered while the backward goes on (`_reduce_scatter`), the pieces get their gradients
(`finish_gradient_sync`, which first sends what is left), and the update follows (`step`). State dicts,
clipping and refusals are in sharded_optimizer.py.

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
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.timeline import span
from zero.run import BucketedZeroArgs, ZeroRun
from zero.sharded_optimizer import ShardedOptimizer


class ZeroOptimizer(ShardedOptimizer):
    """Trains a model with an `optimizer_class`: each rank of `group` updates a shard of the parameters.

    The class must update each number from its own gradient and state only, as SGD and Adam do: a shard cuts
    through parameters. `params` are as torch's optimizers take them. Parameters become rank 0's; buffers do
    not. Call `finish_gradient_sync()` after the last backward, or let `step()` call it. With several
    microbatches, divide each loss by their number, and run all but the last inside `no_sync()`.

    Gradients do not stay in the model: clip with `clip_grad_norm_` of this class. shard_guard.py and
    step_guard.py say what is refused.
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
        self._gradients: dict[ParameterBucket, Tensor] = {}  # a flat tensor of gradients for each bucket
        self._views: dict[Tensor, Tensor] = {}  # the place of each parameter's gradient in them
        self._in_flight: list[Work] = []
        caps = first_mb, bucket_mb
        super().__init__(params, optimizer_class, defaults, group, pattern, caps, self._reduce_scatter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train these parameters, too. Torch's constructor calls it; later, all ranks must call it."""
        for bucket in self._divide(param_group):
            self._gradients[bucket] = torch.zeros_like(bucket.full)
            views = bucket.flat.views(self._gradients[bucket])
            self._views |= zip(bucket.flat.parameters, views, strict=True)
            for parameter in bucket.flat.parameters:
                replace_hook(parameter, self._on_gradient)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Run as a hook in the backward: move the gradient into its bucket, which may now be complete."""
        if not self._has_arrived(parameter):
            return
        self._move_in(parameter)
        if self._steps.is_synchronising:
            # The gradient may be in flight from here on, so a placeholder refuses every use of it.
            parameter.grad = self._guard.placeholder(parameter)
            self._arrivals.add(parameter)  # calls _reduce_scatter when a bucket is complete

    def _move_in(self, parameter: Tensor) -> None:
        """Copy a new gradient into its bucket; autograd will add the next microbatch's to it there."""
        view = self._views[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def _reduce_scatter(self, bucket: ParameterBucket) -> None:
        """Start the reduce-scatter of a complete bucket: this rank's shard becomes the mean over ranks."""
        gradients = self._gradients[bucket]
        shard = gradients[bucket.flat.mine]
        with span(bucket.name, "launch", lane="launches", bytes=gradients.nbytes):
            handle = reduce_scatter(
                shard, gradients, op="mean", group=self.group, async_op=True, pattern=self.pattern
            )
        self._in_flight.append(handle)

    def _complete_buckets(self) -> None:
        """Send what no hook has sent: gradients of earlier microbatches, or zeros. Wait for all buckets."""
        for parameter in self._arrivals.missing():
            if self._has_unsent_gradient(parameter):
                self._move_in(parameter)
            else:
                self._views[parameter].zero_()
            self._arrivals.add(parameter)
        for handle in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self._arrivals.reset()

    def finish_gradient_sync(self) -> None:
        """Give each piece its part of the mean gradient, after the last backward.

        Where a rank did not use a parameter, it contributes zeros. A parameter that no rank used has no
        gradient, and the optimizer leaves it alone.
        """
        if self._steps.is_synced:
            return
        self._complete_buckets()
        used = self._agree_on_used()
        for bucket in self.buckets:
            self._give_gradients(bucket, self._gradients[bucket][bucket.flat.mine], used)

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
        """End a backward that no step has followed: send what other ranks wait for, and wait for it."""
        if self._arrivals:
            self._complete_buckets()


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
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, **memory.finish(as_json=args.json))


if __name__ == "__main__":
    start(main, BucketedZeroArgs)
