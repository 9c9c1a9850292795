"""ZeRO, stage 1: the same as train_zero1_textbook.py, but gradients travel in buckets during the backward.

      compute        |  forward  |     backward     |      | step, own shards |                 |
      on the wire                     |■■0■■||■■1■■||■■2■■|                   |■■ all-gathers ■■|
                                      └ reduce-scatters of buckets

As there, a rank needs P + G + O/n bytes of memory, and sends (n-1)/n (G + P) in a step (P, G, O: bytes of
parameters, gradients and optimizer state). But its shard is an n-th of each bucket, and not of each
parameter. The backward hides all reduce-scatters except for the last. The all-gathers have to wait for the
step, and nothing hides them.

The trick is in the memory (shards.py). The model's parameters become views of flat buckets. The inner
optimizer is an ordinary one that trains this rank's shards of the parameters. Because they share the bucket's
memory, its step writes into the bucket, and an all-gather of the shards changes the model. Gradients have a
flat tensor of their own for each bucket, in the same layout.

A gradient moves into its bucket (`_on_gradient`), a complete bucket is reduce-scattered while the backward
continues (`_launch`), and `step` sends what is left, waits (`finish_gradient_sync`), updates and gathers.
Parts of the technique: shards.py, the layout, and memory.py, the report.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from comm.collectives import Group, Work, all_gather, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.train_bucket_overlap import fill
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from training.arguments import ZeroArgs
from training.clipping import clip_grad_norm_
from training.guard import guarded
from training.run import Run
from training.state_shards import StateShard
from zero.memory import owned, shares_of
from zero.shards import FlatLayout, checkpointed


class Bucket:
    """Has some parameters in one flat tensor, and their gradients in another; this rank updates a shard.

      full         |     weight 0     | bias 0 |       weight 1       |.|     what the model computes with
      gradients    |     weight 0     | bias 0 |       weight 1       |.|
      shards                          |w| bias 0 | w 1 |                      what rank 1 of 3 updates

    `missing` holds the parameters whose gradient is not there yet.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, ranks: int) -> None:
        self.layout = FlatLayout(parameters, rank, ranks)
        self.full = parameters[0].new_zeros(self.layout.numel)
        self.gradients = torch.zeros_like(self.full)
        for parameter, view in self.layout.views(self.full):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shards = self.layout.parameter_shards(self.full[self.layout.mine])
        self.gradient_views = dict(self.layout.views(self.gradients))
        self.missing = set(parameters)


class ShardOptimizer(Optimizer):
    """Lays parameters out in buckets for an optimizer of this rank's shards, and is checkpointed."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        group: Group = None,
        bucket_mb: float = 4.0,
        **defaults: Any,
    ) -> None:
        groups = optimizer_class(params, **defaults).param_groups  # `params` can have several forms
        self.group = group
        self.buckets: list[Bucket] = []
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        for options in groups:
            for parameter in options["params"]:
                broadcast(parameter.data, root=0, group=group)
            trained = [parameter for parameter in reversed(options["params"]) if parameter.requires_grad]
            buckets = [Bucket(some, rank, ranks) for some in fill(trained, min(0.25, bucket_mb), bucket_mb)]
            options["params"] = [shard.tensor for bucket in buckets for shard in bucket.shards]
            options.pop("param_names", None)
            self.buckets += buckets
        self.inner = optimizer_class(groups, **defaults)
        super().__init__(self.inner.param_groups, defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.parameter_shards = [shard for bucket in self.buckets for shard in bucket.shards]

    def state_shards(self, model: nn.Module) -> list[StateShard]:
        """Return, for a checkpoint, the model as every rank has it, and this rank's shards of the state."""
        return checkpointed(model, self.parameter_shards, self)


@guarded
class ZeroOptimizer(ShardOptimizer):
    """Trains a model with an `optimizer_class`: each rank of `group` updates a shard of the parameters.

    `optimizer_class` must update each number from its own gradient and state only, as SGD and Adam do,
    because a shard cuts through parameters. `params` are as torch's optimizers take them. All ranks begin
    with rank 0's parameters; buffers are not sent. An unused parameter gets zeros. Gradients do not stay in
    the model, so clip with this class's own `clip_grad_norm_`: torch's would find none.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.layout.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._to_launch, self._in_flight = deque(self.buckets), deque[tuple[Bucket, Work]]()
        self.require_backward_grad_sync = True  # DDP's name; False in all microbatches but the last
        self._is_synchronised = False  # whether the shards have the mean of all gradients so far

    def _on_gradient(self, parameter: Any) -> None:
        """Run as a hook in the backward: move the gradient into its bucket, and send complete buckets."""
        if parameter.grad is None:  # autograd's result was None
            return
        self._is_synchronised = False
        bucket = self._bucket_of[parameter]
        self._move_in(parameter, bucket)
        if self.require_backward_grad_sync:
            bucket.missing.discard(parameter)
            # Ranks pair messages by their order: a complete bucket waits for those before it.
            while self._to_launch and not self._to_launch[0].missing:
                self._launch(self._to_launch.popleft())

    def _move_in(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Copy a new gradient into its bucket; a gradient that this rank does not have is zero."""
        view = bucket.gradient_views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        # While more microbatches follow, `grad` stays the view, to which autograd adds their gradients.
        parameter.grad = None if self.require_backward_grad_sync else view

    def _launch(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket: this rank's part of the gradients becomes the mean."""
        mine = bucket.gradients[bucket.layout.mine]
        work = reduce_scatter(mine, bucket.gradients, "mean", self.group, async_op=True)
        self._in_flight.append((bucket, work))

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduce-scatter, and give each shard its part of the mean gradient."""
        bucket, work = self._in_flight.popleft()
        work.wait()
        bucket.layout.add_gradient(bucket.shards, bucket.gradients[bucket.layout.mine])

    def finish_gradient_sync(self) -> None:
        """Send what is left after the last backward, with zeros for unused parameters, and wait for all.

        `clip_grad_norm_` and `step` call it.
        """
        if self._is_synchronised:
            return
        while self._to_launch:
            bucket = self._to_launch.popleft()
            for parameter in bucket.missing:
                self._move_in(parameter, bucket)
            self._launch(bucket)
        while self._in_flight:
            self._wait_for_oldest()
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.parameters)
        self._to_launch.extend(self.buckets)
        self._is_synchronised = True

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; return their norm."""
        self.finish_gradient_sync()
        shards = [shard.tensor for shard in self.parameter_shards]
        return clip_grad_norm_(shards, max_norm, [self.group], norm_type)

    def step(self, closure: Any = None, **options: Any) -> None:  # type: ignore[override]
        """Average the gradients, update this rank's shards, and gather the parameters from all ranks."""
        if closure is not None:
            raise WorkbookError("ZeRO's step() takes no closure: run the backward before it.")
        self.finish_gradient_sync()
        self.inner.step(**options)
        self.gather_parameters()

    def gather_parameters(self) -> None:
        """Collect the shards of all ranks in the buckets, which the model computes with."""
        works = [all_gather(b.full, b.full[b.layout.mine], self.group, async_op=True) for b in self.buckets]
        for work in works:
            work.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, so that the next backward can begin."""
        for shard in self.parameter_shards:
            shard.parameter.grad = shard.tensor.grad = None
        self._is_synchronised = False

    def traffic(self, reductions: int = 1, is_clipped: bool = False) -> Traffic:
        """Return what a rank sends in a step with so many reduce-scatters of each bucket."""
        total = expected_traffic("all_reduce", None, 1, 8, self.group) if is_clipped else Traffic()
        for bucket in self.buckets:
            for op in ["all_gather", *["reduce_scatter"] * reductions]:
                total += expected_traffic(op, None, bucket.full.numel(), bucket.full.itemsize, self.group)
        return total


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT on the source of Python's standard library, with the training state sharded."""

    bucket_mb: float = 4.0
    """Size in MiB at which a bucket takes no more parameters. For the first bucket it is at most 0.25."""


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "zero1")
    model = run.model()
    optimizer_class, options = args.optimizer_class()
    optimizer = ZeroOptimizer(model.parameters(), optimizer_class, bucket_mb=args.bucket_mb, **options)
    memory = MemoryReport(
        model, optimizer, owned(1, shares_of(model, optimizer.parameter_shards), args.states)
    )
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        parts = microbatches(x, y, args.grad_acc_steps)
        loss = accumulate(model, parts, run.num_targets, sender=optimizer)
        if args.clip is not None:
            optimizer.clip_grad_norm_(args.clip)
        optimizer.step()
        run.record(loss)
    run.finish(model, traffic=optimizer.traffic(is_clipped=args.clip is not None), **memory.fields())


if __name__ == "__main__":
    start(main, Args)
