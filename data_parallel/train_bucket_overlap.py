"""Buckets and overlap: what production does. Gradients travel in a few large messages, as early as they can.

      backward     head  block 3  block 2  block 1  block 0  embedding
      buckets      [ 0 ][   1   ][     2      ][     3     ][    4   ]
      on the wire       |■0|■■■1■■■|■■■■■2■■■■■|■■■■■3■■■■■|■■4■■|
                                                                 └ only this tail can never be hidden

A message of its own for each parameter pays a latency each; one for all starts when everything is over.
So gradients share contiguous buckets, in the order in which the backward finishes them. The first is
small, so that the link has something to do early. With the buckets' bytes b and the time each is ready:

      end of bucket k = max(ready k, end of bucket k-1) + 2 (n-1) (alpha + b/n beta)
      step            = forward + max(backward, end of the last bucket) + optimizer

Gradients *live* in the buckets: `param.grad` is a view of one, so nothing is copied out (bucket_layout.py). A
gradient that is new (after `zero_grad(set_to_none=True)`) is copied in once, by its hook, while it is in the
cache: that is cheaper than to clear the bucket and let autograd add to it. Where views are kept, nothing
is copied at all.

The order of readiness is observed on rank 0 in the first step; then the buckets are made again in that
order (bucket_order.py). As in PyTorch's DistributedDataParallel: Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704,
section 4.
"""

import contextlib
import dataclasses
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm import cost
from comm.collectives import Group, Work, all_reduce, broadcast, default_pattern
from comm.script import start
from data_parallel.bucket_layout import Bucket, Layout
from data_parallel.bucket_order import BucketOrder
from data_parallel.guard import ReplicaGuard, replace_hook
from data_parallel.run import Run
from lab.cluster import Cluster
from lab.ledger import Traffic
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span
from training.arguments import AccumulationArgs

MIB = 1 << 20
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class BucketDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds; any shapes, tied, frozen and unused parameters.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. Of
    several microbatches, divide each one's loss by their number and run all but the last inside
    `no_sync()`. `wire_dtype` "bf16" or "fp16" halves the bytes on the wire and rounds the gradients.

    What it does not do: send buffers again (they become rank 0's here, then each rank has its own; DDP sends
    rank 0's before every forward), reduce sparse gradients, train parameters that are unfrozen, replaced,
    cast or added later (wrap again; guard.py), or let a rank have fewer batches (see sampler.py).
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        pattern: str | None = None,
        bucket_mb: float = 1.0,
        first_mb: float = 0.25,
        wire_dtype: str | None = None,
    ) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._caps = int(min(first_mb, bucket_mb) * MIB), int(bucket_mb * MIB)
        self._wire_dtype = WIRE_DTYPES[wire_dtype] if wire_dtype else None
        self._guard = ReplicaGuard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.order = BucketOrder(self.trained)
        self._in_flight: list[tuple[Bucket, Tensor, Work]] = []
        self._lay_out()
        for i, parameter in enumerate(self.trained):
            replace_hook(parameter, lambda _, i=i: self._on_gradient(i))

    def _lay_out(self) -> None:
        self._layout = Layout(self.trained, self.order.now, self._caps, self._wire_dtype, self._launch)
        self.buckets = self._layout.buckets

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all but the last microbatch: gradients add up in the buckets and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, i: int) -> None:
        """The gradient of parameter i is complete: that of this microbatch and of those before it."""
        if not self._guard.has_gradient(self.trained[i]):
            return
        if i in self._layout.complete:
            self._drop(i)
        if self.order.take():  # late, for by now the gradients of the step before need not be moved
            self._lay_out()
        self._layout.move_in(i)
        if self._guard.is_synchronising:
            self.order.see(i)
            self._layout.completed(i)

    def _launch(self, k: int) -> None:
        bucket = self.buckets[k]
        with span(f"bucket {k}", "launch", lane="launches", bytes=bucket.flat.nbytes):
            if k == len(self.buckets) - 1:
                used = [float(parameter.grad is not None) for parameter in self.trained]
                bucket.extra.copy_(torch.tensor(used))
            wire, op = bucket.to_wire(dist.get_world_size(self.group))
            handle = all_reduce(wire, op=op, group=self.group, async_op=True, pattern=self.pattern)
        self._in_flight.append((bucket, wire, handle))

    def _wait(self) -> None:
        for bucket, wire, handle in self._in_flight:
            handle.wait()
            bucket.from_wire(wire)
        self._in_flight.clear()
        self._layout.begin()

    def finish_gradient_sync(self) -> None:
        """Complete and start the buckets that still miss a gradient, and wait for all of them.

        A parameter that only some ranks used counts as zero on the others; one that no rank used has no
        gradient afterwards.
        """
        if self.order.take():  # a rank without a backward has not done so yet
            self._lay_out()
        unused = [i for i in self.order.now if i not in self._layout.complete]
        for i in unused:
            if self.trained[i].grad is None:
                self._layout.view(i).zero_()
            else:
                self._layout.move_in(i)  # from an earlier microbatch
        for i in unused:
            self._layout.completed(i)
        self._wait()
        if unused:
            used_somewhere = self.buckets[-1].extra.tolist()
            for i in unused:
                self.trained[i].grad = self._layout.view(i) if used_somewhere[i] else None
        self.order.agree(self.group)
        self._guard.synchronised()

    def _drop(self, i: int) -> None:
        """Forget the backward before, whose gradients the program has dropped."""
        parameter, is_all = self.trained[i], len(self._layout.complete) == len(self.trained)
        is_kept = not is_all or parameter.grad is self._layout.view(i)
        self._guard.refuse_unless_dropped(parameter, is_kept)
        self._wait()
        self.order.forget()

    def get_extra_state(self) -> dict[str, Any]:
        return self.order.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.order.load(state)
        self._lay_out()


@dataclasses.dataclass
class BucketArgs(AccumulationArgs):
    """Bucket overlap: gradients travel in large messages while the backward computes."""

    bucket_mb: float = 1.0
    """Cap of a bucket in MiB; the first has a quarter of a MiB."""
    wire_dtype: Literal["bf16", "fp16"] | None = None
    """Compress what goes over the wire."""


def traffic_per_step(cluster: Cluster, model: BucketDataParallel, pattern: str) -> Traffic:
    """What the formula says this rank sent for the last step: the buckets, and at first their order."""
    place = (cluster.world_size, cluster.rank)
    sizes = [bucket.on_wire for bucket in model.buckets]
    traffic = sum((cost.per_rank("all_reduce", pattern, *size, *place) for size in sizes), Traffic())
    if model.order.was_sent:
        pattern = default_pattern("broadcast")
        traffic += cost.per_rank("broadcast", pattern, len(model.trained), 8, *place)
    return traffic


def main(cluster: Cluster, args: BucketArgs) -> None:
    run = Run(cluster, args, "data_parallel_bucket_overlap")
    model = BucketDataParallel(
        run.model(), pattern=run.pattern, bucket_mb=args.bucket_mb, wire_dtype=args.wire_dtype
    )
    optimizer = run.optimizer(model)
    for step in run.steps(model, optimizer):
        parts = microbatches(*run.batch(step), args.grad_acc_steps)
        with run.step() as this:
            optimizer.zero_grad()
            total = torch.zeros((), device=cluster.device)
            for i, (x, y) in enumerate(parts):
                is_last = i == len(parts) - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    with span("forward", "forward"):
                        loss = loss_of(model(x), y) / len(parts)
                    with span("backward", "backward"):
                        loss.backward()
                total += loss.detach()
            model.finish_gradient_sync()
            with span("step", "optimizer"):
                optimizer.step()
            this.loss = run.mean_loss(total)
        run.sent(traffic_per_step(cluster, model, run.pattern))
    run.finish(model, buckets=len(model.buckets))


if __name__ == "__main__":
    start(main, BucketArgs)
