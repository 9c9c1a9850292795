"""ZeRO, stage 1: every rank holds all parameters and gradients, but only an n-th of the optimizer's state.

      rank 0   gradients ─┐                 ┌─► shard 0 ─► optimizer, state 0 ─┐            ┌─► parameters
      rank 1   gradients ─┼─ reduce-scatter ┼─► shard 1 ─► optimizer, state 1 ─┼ all-gather ┼─► parameters
      rank 2   gradients ─┘      mean       └─► shard 2 ─► optimizer, state 2 ─┘            └─► parameters

In plain data parallel every rank computes the same update from the same optimizer state. But a number has to
be updated by one rank only. So each of the n ranks keeps the state of an n-th of the parameters, its shard,
updates that, and sends the result to the others. An all-reduce is a reduce-scatter and then an all-gather;
here the optimizer stands between the two. The all-gather has to wait for the step, and nothing hides it. A
rank sends as many bytes as in plain data parallel (P = G); only the optimizer's state becomes smaller:

      memory of a rank    P + G + O/n      bytes that a rank sends in a step    (n-1)/n (G + P)
      P, G, O: bytes of parameters, gradients and optimizer state; AdamW in float32: 4, 4 and 8 per parameter

The trick is in the memory (shards.py). The model's parameters become views of flat buckets, and an n-th of
each bucket is this rank's shard. The inner optimizer is an ordinary one that trains this rank's shards of
the parameters. Because they share the bucket's memory, its step writes into the bucket, and an all-gather of
the shards changes the model. Gradients have a flat tensor of their own for each bucket, in the same layout.

`ShardOptimizer` lays the memory out. `ZeroOptimizer` reads from top to bottom: a gradient moves into its
bucket (`_on_gradient`), a complete bucket is reduce-scattered while the backward continues (`_launch`), what
is left is sent and awaited (`finish_gradient_sync`), and the update follows (`step`). `_guard` only refuses
wrong use (training/guard.py). Parts of the technique: shards.py, the layout, and memory.py, the report.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
https://arxiv.org/abs/1910.02054.
"""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from comm.collectives import Group, Work, all_gather, broadcast, reduce_scatter
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.memory import MemoryReport
from lab.trace.timeline import span
from training.arguments import ZeroArgs
from training.checkpoint import Shard
from training.clipping import clip_grad_norm_
from training.guard import Guard, refuse_unless_elementwise
from training.run import Run
from zero.memory import owned, shares_of
from zero.shards import FlatLayout, fill_buckets


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
        for parameter, view in zip(parameters, self.layout.views(self.full), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shards = self.layout.parameter_shards(self.full[self.layout.mine])
        self.gradient_views = dict(zip(parameters, self.layout.views(self.gradients), strict=True))
        self.missing = set(parameters)


class ShardOptimizer(Optimizer):
    """Lays parameters out in buckets for an optimizer of this rank's shards; clips, and is checkpointed."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        group: Group = None,
        pattern: str | None = None,
        bucket_mb: float = 4.0,
        **defaults: Any,
    ) -> None:
        groups = optimizer_class(params, **defaults).param_groups  # `params` can have several forms
        refuse_unless_elementwise(optimizer_class, defaults)
        self.group, self.pattern = group, pattern
        self._guard = Guard(nn.ParameterList(p for options in groups for p in options["params"]))
        self.buckets: list[Bucket] = []
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        for options in groups:
            for parameter in options["params"]:
                broadcast(parameter.data, root=0, group=group)
            buckets = [Bucket(some, rank, ranks) for some in fill_buckets(options["params"], bucket_mb)]
            options["params"] = [shard.tensor for bucket in buckets for shard in bucket.shards]
            options.pop("param_names", None)
            self.buckets += buckets
        self.inner = optimizer_class(groups, **defaults)
        super().__init__(self.inner.param_groups, defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.parameter_shards = [shard for bucket in self.buckets for shard in bucket.shards]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; return their norm."""
        self._guard.before_step()
        trained = [shard.tensor for shard in self.parameter_shards]
        return clip_grad_norm_(trained, max_norm, [self.group], self.pattern)

    def shards(self, model: nn.Module) -> list[Shard]:
        """Return, for a checkpoint, the model as every rank has it, and this rank's shards of the state."""
        model = getattr(model, "_orig_mod", model)  # torch.compile(model) gives parameters other names
        names = {parameter: name for name, parameter in model.named_parameters()}
        full = [*model.named_parameters(), *model.named_buffers()]
        found = [Shard(f"model/{name}", tensor.detach()) for name, tensor in full]
        for shard in self.parameter_shards:
            _, *state = shard.checkpointed(names[shard.parameter], self)
            found += state
        return found

    def state_dict(self) -> NoReturn:
        raise WorkbookError("A rank has the optimizer's state of its own shards only: save `shards(model)`.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "parameter_shards"):  # set once torch's constructor has added its groups
            raise WorkbookError("ZeRO has divided the parameters already: give it all of them at once.")
        super().add_param_group(param_group)


class ZeroOptimizer(ShardOptimizer):
    """Trains a model with an `optimizer_class`: each rank of `group` updates a shard of the parameters.

    `optimizer_class` must update each number from its own gradient and state only, as SGD and Adam do,
    because a shard cuts through parameters. `params` are as torch's optimizers take them. All ranks begin
    with rank 0's parameters; buffers are not sent. Call `finish_gradient_sync()` after the last backward, and
    run the others inside `no_sync()`. An unused parameter gets zeros. Gradients do not stay in the model, so
    clip with this class's `clip_grad_norm_`: torch's would find none.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.layout.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._to_launch, self._in_flight = deque(self.buckets), deque[tuple[Bucket, Work]]()
        self._is_synchronised = False  # from finish_gradient_sync() to zero_grad()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Run all backwards but the last inside: gradients add up in the buckets, and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, parameter: Tensor) -> None:
        """Run as a hook in the backward: move the gradient into its bucket, and send complete buckets."""
        if self._is_synchronised:
            raise WorkbookError("A backward came after finish_gradient_sync(): call zero_grad() in between.")
        if not self._guard.note_arrival(parameter):  # autograd's result was None
            return
        bucket = self._bucket_of[parameter]
        self._move_in(parameter, bucket)
        if self._guard.is_synchronising:
            bucket.missing.discard(parameter)
            # Ranks pair messages by their order: a complete bucket waits for those before it.
            while self._to_launch and not self._to_launch[0].missing:
                self._launch(self._to_launch.popleft())

    def _move_in(self, parameter: Tensor, bucket: Bucket) -> None:
        """Copy a new gradient into its bucket; a gradient that this rank does not have is zero."""
        view = bucket.gradient_views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        # Inside no_sync() autograd adds the gradient of the next microbatch to this one.
        parameter.grad = None if self._guard.is_synchronising else view

    def _launch(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket: this rank's part of the gradients becomes the mean."""
        mine = bucket.gradients[bucket.layout.mine]
        work = reduce_scatter(
            mine, bucket.gradients, op="mean", group=self.group, async_op=True, pattern=self.pattern
        )
        self._in_flight.append((bucket, work))

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduce-scatter, and give each shard its part of the mean gradient."""
        bucket, work = self._in_flight.popleft()
        work.wait()
        bucket.layout.add_gradient(bucket.shards, bucket.gradients[bucket.layout.mine])

    def finish_gradient_sync(self) -> None:
        """Send what is left after the last backward, with zeros for unused parameters, and wait for all."""
        if self._is_synchronised:
            return
        self._guard.before_forward()  # refuse parameters that were frozen or replaced since the wrapping
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
        self._guard.expect_gradients()
        self._is_synchronised = True

    def step(self, closure: Any = None) -> None:
        """Update this rank's shards, and gather those of all ranks: the model has all new parameters."""
        if closure is not None:
            raise WorkbookError("ZeRO's step() takes no closure: run the backward before it.")
        self._guard.before_step()
        self.inner.step()
        self.gather_parameters()

    def gather_parameters(self) -> None:
        """Collect the shards of all ranks in the buckets, which the model computes with."""
        works = [
            all_gather(b.full, b.full[b.layout.mine], self.group, async_op=True, pattern=self.pattern)
            for b in self.buckets
        ]
        for work in works:
            work.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, so that the next backward can begin."""
        for shard in self.parameter_shards:
            shard.parameter.grad = shard.tensor.grad = None
        self._is_synchronised = False


def traffic_per_step(optimizer: ZeroOptimizer, reductions: int = 1, is_clipped: bool = False) -> Traffic:
    """Return the traffic to expect of a step with so many reduce-scatters of each bucket."""
    pattern, group = optimizer.pattern, optimizer.group
    total = expected_traffic("all_reduce", pattern, 1, 8, group) if is_clipped else Traffic()
    for bucket in optimizer.buckets:
        for op in ["all_gather", *["reduce_scatter"] * reductions]:
            total += expected_traffic(op, pattern, bucket.full.numel(), bucket.full.itemsize, group)
    return total


@dataclasses.dataclass
class Args(ZeroArgs):
    """Train a small GPT on the source of Python's standard library, with the training state sharded."""

    bucket_mb: float = 4.0
    """Size in MiB at which a bucket takes no more parameters. For the first bucket it is at most 0.25."""


def main(cluster: Cluster, args: Args, stage: int = 1, sharded: type[ZeroOptimizer] = ZeroOptimizer) -> None:
    run = Run(cluster, args, f"zero{stage}")
    model = run.model()
    optimizer_class, options = args.optimizer_class()
    optimizer = sharded(model.parameters(), optimizer_class, None, run.pattern, args.bucket_mb, **options)
    should = owned(stage, shares_of(model, optimizer.parameter_shards), args.states)
    memory = MemoryReport(model, optimizer, should)
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            parts = microbatches(x, y, args.grad_acc_steps)
            with run.step() as record:
                num_targets = run.valid_targets(y)
                optimizer.zero_grad()
                total = torch.zeros((), device=cluster.device)
                for i, (x, y) in enumerate(parts):
                    is_last = i == len(parts) - 1
                    with contextlib.nullcontext() if is_last else optimizer.no_sync():
                        with span("forward", "forward"), memory.forward():
                            loss = loss_of(model(x), y, num_targets)
                        with span("backward", "backward"):
                            loss.backward()
                    total += loss.detach()
                optimizer.finish_gradient_sync()
                if args.clip is not None:
                    optimizer.clip_grad_norm_(args.clip)
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(total)
            reductions = len(parts) if stage == 2 else 1  # stage 2 sends in each microbatch
            run.expect_traffic(traffic_per_step(optimizer, reductions, args.clip is not None))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, **memory.fields())


if __name__ == "__main__":
    start(main, Args)
