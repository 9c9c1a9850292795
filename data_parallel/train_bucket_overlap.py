"""Buckets and overlap: gradients travel in a few large messages while the backward still computes.

      backward      head  block 3  block 2  block 1  block 0  embedding
      buckets       [ 0 ][   1   ][   2   ][   3   ][   4   ][   5    ]
      on the wire        |■0|     |■■■■1■■■■||■■■■2■■■■||■■■■3■■■■||■■■■4■■■■||■■5■■|
                                                                      └─ costs time ─┘

With one message for each parameter, each pays a latency. One message for all of them cannot start before the
backward ends. So gradients share flat buckets, in the order in which the backward computes them, and a
bucket is sent when all of its gradients are there. The first bucket is small, so that sending begins
early. For n ranks in a ring, a latency of alpha seconds, beta seconds per byte and buckets of b bytes
(comm/cost.py), in seconds from the start of the backward:

      end of bucket k = max(bucket k is complete, end of bucket k-1) + 2 (n-1) (alpha + (b/n) beta)
      step            = forward + max(end of the backward, end of the last bucket) + optimizer

Gradients live in the buckets: `param.grad` is a view of its place in one, so nothing is copied after the
all-reduce. After `zero_grad(set_to_none=True)` a parameter has no gradient, so autograd makes a new tensor,
and the hook copies it into the bucket. After `zero_grad(set_to_none=False)` the gradient is still the view,
so autograd adds to zeros in the bucket; that takes longer.

Production code needs four more things, which are in other files: the order of the gradients, which is a
guess in the first step and afterwards what rank 0 observed in it (bucket_order.py), 16 bits on the wire
(wire_format.py), parameters that some ranks did not use (used_parameters.py), and errors for wrong use
(guard.py). PyTorch's DistributedDataParallel is built on the same idea: Li et al., VLDB 2020,
https://arxiv.org/abs/2006.15704.
"""

import contextlib
import dataclasses
from collections import deque
from typing import Any, Literal

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.bucket_memory import OWN_MEMORY, OwnMemory, SharedMemory
from data_parallel.bucket_order import BucketOrder
from data_parallel.flat import fill
from data_parallel.guard import ReplicaGuard, replace_hook
from data_parallel.run import Run
from data_parallel.used_parameters import note_used, used_on_any_rank
from data_parallel.wire_format import WIRE_DTYPES, RoundedAllReduce, size_on_wire
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.timeline import span
from lab.units import MIB
from training.arguments import AccumulationArgs


class Bucket:
    """A flat tensor that holds the gradients of some parameters, so that one message carries them all.

    flat      | gradient 4 | gradient 3 | gradient 2 | flags |      each view is the place of one gradient

    `missing` holds the parameters whose gradient is not there yet. The last bucket has `num_flags`
    more numbers, which tell which parameters were used.
    """

    def __init__(
        self, parameters: list[nn.Parameter], num_flags: int = 0, memory: OwnMemory = OWN_MEMORY
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = memory.zeros(sum(sizes) + num_flags, parameters[0])
        *places, self.flags = self.flat.split([*sizes, num_flags])
        self.views = {p: place.view_as(p) for p, place in zip(parameters, places, strict=True)}
        self.missing: set[Tensor] = set(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                self.move_in(parameter)

    def move_in(self, parameter: Tensor) -> None:
        """Make the gradient a view of this bucket; if there is no gradient, fill its place with zeros."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view


class BucketDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds, and averages its gradients over the ranks.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. With
    several microbatches, divide each loss by their number and run all but the last inside `no_sync()`.
    `wire_dtype` "bf16" or "fp16" halves the bytes that are sent, and rounds the gradients. With `in_place`
    nothing is sent: the buckets lie in memory that the ranks of one machine share (bucket_memory.py).
    Tied, frozen and unused parameters are supported; guard.py says what is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        pattern: str | None = None,
        bucket_mb: float = 1.0,
        first_mb: float = 0.25,
        wire_dtype: str | None = None,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, "in_place" if in_place else pattern
        self.wire_dtype = WIRE_DTYPES[wire_dtype] if wire_dtype else None
        self._caps = int(min(first_mb, bucket_mb) * MIB), int(bucket_mb * MIB)
        self._guard = ReplicaGuard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.order = BucketOrder(self.trained)
        self._memory = SharedMemory(self.trained, group, self.wire_dtype) if in_place else OwnMemory()
        self._make_buckets()
        self.sizes_on_wire = [size_on_wire(bucket.flat, self.wire_dtype) for bucket in self.buckets]
        for parameter in self.trained:
            replace_hook(parameter, self._on_gradient)

    def _make_buckets(self) -> None:
        """Divide the gradients among buckets, in the order in which the backward completes them."""
        ordered = self.order.parameters()
        filled = [[ordered[at] for at in positions] for positions in fill(ordered, *self._caps)]
        flags = [0] * (len(filled) - 1) + [len(ordered)]
        self._memory.reuse(ordered)
        self.buckets = [Bucket(some, n, self._memory) for some, n in zip(filled, flags, strict=False)]
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.views}
        self._to_launch, self._in_flight = deque(self.buckets), []

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Run all microbatches but the last inside: gradients add up in the buckets, and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, parameter: Tensor) -> None:
        """Run as a hook when a backward has added its gradient of this parameter."""
        if not self._guard.has_gradient(parameter):
            return  # autograd also calls the hook where a backward has returned None
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            self._drop_unfinished(parameter)
        bucket.move_in(parameter)
        if self._guard.is_synchronising:
            self.order.see(parameter)
            bucket.missing.remove(parameter)
            # Ranks pair collectives by the order of the calls: a complete bucket waits for those before it.
            while self._to_launch and not self._to_launch[0].missing:
                self._launch(self._to_launch.popleft())

    def _launch(self, bucket: Bucket) -> None:
        """Start to reduce the bucket, and return while it travels: the backward goes on."""
        with span(f"bucket {len(self._in_flight)}", "launch", lane="launches", bytes=bucket.flat.nbytes):
            if bucket is self.buckets[-1]:  # the gradients that this rank has are all there
                note_used(self.trained, bucket.flags)
            if self.wire_dtype is None:
                work = all_reduce(bucket.flat, "mean", self.group, async_op=True, pattern=self.pattern)
            else:
                work = RoundedAllReduce(bucket.flat, self.wire_dtype, self.group, self.pattern)
        self._in_flight.append(work)

    def finish_gradient_sync(self) -> None:
        """Launch the remaining buckets, with zeros for gradients that this rank does not have; wait for all.

        A parameter that no rank used has no gradient afterwards.
        """
        without_hook = [parameter for bucket in self._to_launch for parameter in bucket.missing]
        for parameter in without_hook:
            self._bucket_of[parameter].move_in(parameter)
        while self._to_launch:
            self._launch(self._to_launch.popleft())
        self._wait_for_all()
        if without_hook:
            used = used_on_any_rank(self.trained, self.buckets[-1].flags)
            for parameter in without_hook:
                parameter.grad = self._bucket_of[parameter].views[parameter] if parameter in used else None
        self.sizes_on_wire = [size_on_wire(bucket.flat, self.wire_dtype) for bucket in self.buckets]
        if self.order.adopt_observed(self.group):  # only in the first step
            self._make_buckets()
        self._guard.synchronised()

    def _wait_for_all(self) -> None:
        """Wait for the handles of all buckets in flight, and prepare for the next backward."""
        for work in self._in_flight:
            work.wait()
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
        self._to_launch, self._in_flight = deque(self.buckets), []

    def _drop_unfinished(self, parameter: Tensor) -> None:
        """Refuse a second backward, unless the gradients of the first, unfinished one were dropped."""
        is_kept = bool(self._to_launch) or parameter.grad is self._bucket_of[parameter].views[parameter]
        self._guard.refuse_unless_dropped(parameter, is_kept)
        self._wait_for_all()
        self.order.forget()

    def get_extra_state(self) -> dict[str, Any]:
        return self.order.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.order.load(state)
        self._make_buckets()


@dataclasses.dataclass
class BucketArgs(AccumulationArgs):
    """Bucket overlap: gradients travel in large messages while the backward computes."""

    bucket_mb: float = 1.0
    """Size in MiB at which a bucket takes no more parameters. For the first bucket it is at most 0.25."""
    wire_dtype: Literal["bf16", "fp16", None] = None
    """Data type in which gradients are sent: 16 bits halve the traffic, and round the gradients. None: their
    own type."""
    in_place: bool = False
    """Keep the buckets in memory that all ranks share, and average them there. All ranks must be on one
    machine, and none in a container."""


def traffic_per_step(model: BucketDataParallel, pattern: str) -> Traffic:
    """Return this rank's expected traffic for the last step: buckets, and their order if it was sent."""
    sizes, pattern = model.sizes_on_wire, model.pattern or pattern
    traffic = sum((expected_traffic("all_reduce", pattern, *size, model.group) for size in sizes), Traffic())
    if model.order.was_sent:
        traffic += expected_traffic("broadcast", None, len(model.trained), 8, model.group)
    return traffic


def main(cluster: Cluster, args: BucketArgs) -> None:
    run = Run(cluster, args, "data_parallel_bucket_overlap")
    model = BucketDataParallel(
        run.model(), None, run.pattern, args.bucket_mb, wire_dtype=args.wire_dtype, in_place=args.in_place
    )
    optimizer = run.optimizer(model)
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            parts = microbatches(*run.batch(step), args.grad_acc_steps)
            with run.step() as record:
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
                record.loss = run.mean_loss(total)
            run.expect_traffic(traffic_per_step(model, run.pattern))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, buckets=len(model.buckets))


if __name__ == "__main__":
    start(main, BucketArgs)
