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

Gradients *live* in the buckets: `param.grad` is a view of one, so nothing is copied out. A gradient that
is made anew (after `zero_grad(set_to_none=True)`) is copied in once, by its hook, while it is in the
cache: that is cheaper than to clear the bucket and let autograd add to it. Where views are kept, nothing
is copied at all.

The order of readiness is observed on rank 0 in the first step; then the buckets are made anew in that
order. As in PyTorch's DistributedDataParallel: Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704,
section 4.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from comm import cost
from comm.arguments import AccumulationArgs
from comm.collectives import Group, Work, all_reduce, broadcast, default_pattern
from comm.rendezvous import joined
from data_parallel.flat import fill
from data_parallel.in_order import InOrder
from data_parallel.run import Run
from lab.cluster import Cluster
from lab.errors import WorkbookError
from lab.ledger import Traffic
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span

MIB = 1 << 20
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Bucket:
    """Room for the gradients of some parameters, one behind the other, and `num_extra` numbers at the end."""

    def __init__(self, parameters: list[nn.Parameter], num_extra: int = 0) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(
            sum(sizes) + num_extra, dtype=parameters[0].dtype, device=parameters[0].device
        )
        *parts, self.extra = self.flat.split([*sizes, num_extra])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


class BucketDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds; any shapes, tied, frozen and unused parameters.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. Of
    several microbatches, divide each one's loss by their number and run all but the last inside
    `no_sync()`. `wire_dtype` "bf16" or "fp16" halves the bytes on the wire and rounds the gradients.
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
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        # By registration; `_order` lists their numbers in the order of the buckets, at first backwards.
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._order: list[int] = []
        self.buckets: list[Bucket] = []
        self._place: dict[int, tuple[int, Tensor]] = {}  # in which bucket, and where
        self._observed: list[int] | None = []  # the order of the first step, until it is known
        self._next_order: list[int] | None = None
        self._synchronising = True
        self._in_flight: list[tuple[Bucket, Tensor, Work]] = []
        self.sent_order = False
        self._lay_out(list(range(len(self.trained)))[::-1])
        for i, parameter in enumerate(self.trained):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._on_gradient(i))

    def _lay_out(self, order: list[int]) -> None:
        """Make buckets for the parameters in this order, and move what gradients there are."""
        self._order, self.buckets, self._place = order, [], {}
        ordered = [self.trained[i] for i in order]
        filled = fill(ordered, *self._caps)
        for k, positions in enumerate(filled):
            # At the end of the last one, a number for each parameter: has any rank used it?
            num_flags = len(ordered) if k == len(filled) - 1 else 0
            self.buckets.append(Bucket([ordered[at] for at in positions], num_flags))
            for at, view in zip(positions, self.buckets[k].views, strict=True):
                self._place[order[at]] = (k, view)
                if self.trained[order[at]].grad is not None:
                    self._move_in(order[at])
        self._to_come = [len(positions) for positions in filled]
        self._launches = InOrder(len(filled), self._launch)
        self._fired: set[int] = set()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last microbatch: gradients add up in the buckets and nothing is sent."""
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True

    def _on_gradient(self, i: int) -> None:
        """The gradient of parameter i is complete: that of this microbatch and of those before it."""
        if i in self._fired:
            raise WorkbookError(
                "Another backward began before finish_gradient_sync(): run all but the last microbatch "
                "inside no_sync()."
            )
        self._use_agreed_order()
        self._move_in(i)
        if self._synchronising:
            if self._observed is not None:
                self._observed.append(i)
            self._complete(i)

    def _use_agreed_order(self) -> None:
        """Late, for by now the gradients of the step before are gone, and need not be moved."""
        if self._next_order is not None:
            order, self._next_order = self._next_order, None
            self._lay_out(order)

    def _move_in(self, i: int) -> None:
        parameter, view = self.trained[i], self._place[i][1]
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view

    def _complete(self, i: int) -> None:
        self._fired.add(i)
        k, _ = self._place[i]
        self._to_come[k] -= 1
        if self._to_come[k] == 0:
            self._launches.ready(k)

    def _launch(self, k: int) -> None:
        bucket = self.buckets[k]
        with span(f"bucket {k}", "launch", lane="launches", bytes=bucket.flat.nbytes):
            if k == len(self.buckets) - 1:
                used = [float(parameter.grad is not None) for parameter in self.trained]
                bucket.extra.copy_(torch.tensor(used))
            wire, op = bucket.flat, "mean"
            if self._wire_dtype is not None:
                # Divided first: a sum over many ranks may be too large for fp16.
                wire, op = (wire / dist.get_world_size(self.group)).to(self._wire_dtype), "sum"
            handle = all_reduce(wire, op=op, group=self.group, async_op=True, pattern=self.pattern)
        self._in_flight.append((bucket, wire, handle))

    def finish_gradient_sync(self) -> None:
        """Complete and start the buckets that still miss a gradient, and wait for all of them.

        A parameter that only some ranks used counts as zero on the others; one that no rank used has no
        gradient afterwards.
        """
        self._use_agreed_order()  # a rank without a backward has not done so yet
        unused = [i for i in self._order if i not in self._fired]
        for i in unused:
            if self.trained[i].grad is None:
                self._place[i][1].zero_()
            else:
                self._move_in(i)  # from an earlier microbatch
        for i in unused:
            self._complete(i)
        for bucket, wire, handle in self._in_flight:
            handle.wait()
            if wire is not bucket.flat:
                bucket.flat.copy_(wire)
        if unused:
            used_somewhere = self.buckets[-1].extra.tolist()
            for i in unused:
                self.trained[i].grad = self._place[i][1] if used_somewhere[i] else None
        self._in_flight.clear()
        self._launches.reset()
        self._fired.clear()
        self._to_come = [len(bucket.views) for bucket in self.buckets]
        self.sent_order = self._observed is not None
        if self._observed is not None:
            self._agree_on_order(self._observed)
            self._observed = None

    def _agree_on_order(self, observed: list[int]) -> None:
        """Rank 0's order for all, used from the next backward on; what was not used goes last."""
        order = observed + [i for i in self._order if i not in observed]
        message = torch.tensor(order, device=self.trained[0].device) if order else torch.empty(0)
        broadcast(message, root=0, group=self.group)
        if message.tolist() != self._order:
            self._next_order = message.tolist()

    def wire_itemsize(self, bucket: Bucket) -> int:
        """Bytes of a number on the wire."""
        return (self._wire_dtype or bucket.flat.dtype).itemsize

    def get_extra_state(self) -> dict[str, Any]:
        """The order of the buckets: it decides how sums are rounded, so who goes on needs it."""
        return {"order": self._next_order or self._order, "is_final": self._observed is None}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._observed, self._next_order = (None if state["is_final"] else []), None
        self._lay_out(list(state["order"]))


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
    sizes = [(bucket.flat.numel(), model.wire_itemsize(bucket)) for bucket in model.buckets]
    traffic = sum((cost.per_rank("all_reduce", pattern, *size, *place) for size in sizes), Traffic())
    if model.sent_order:
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
    settings = tyro.cli(BucketArgs)
    with joined() as this_cluster:
        main(this_cluster, settings)
