"""Buckets and overlap: gradients travel in a few large messages while the backward still computes.

      backward      head  block 3  block 2  block 1  block 0  embedding
      buckets       [ 0 ][   1   ][   2   ][   3   ][   4   ][   5    ]
      on the wire        |■0|     |■■■■1■■■■||■■■■2■■■■||■■■■3■■■■||■■■■4■■■■||■■5■■|
                                                                      └─ costs time ─┘

With one message for each parameter, each pays a latency. One message for all of them cannot start before the
backward ends. So gradients share flat buckets, and a bucket is sent when all of its gradients are there. The
first bucket is small, so that sending begins early. For n ranks in a ring, a latency of alpha seconds, beta
seconds per byte and buckets of b bytes (comm/cost.py), in seconds from the start of the backward:

      end of bucket k = max(bucket k is complete, end of bucket k-1) + 2 (n-1) (alpha + (b/n) beta)
      step            = forward + max(end of the backward, end of the last bucket) + optimizer

Buckets are filled in the reverse of the order in which the model registers its parameters. That is about the
order in which a backward computes their gradients, if the model registers its layers in the order in which it
runs them. If not, training is right, but less is hidden. With the layers registered backwards, nothing is
hidden.

Gradients live in the buckets: `param.grad` is a view of its place in one, so nothing is copied after the
all-reduce. By default `zero_grad()` drops the view: autograd makes a new tensor, and the hook copies it into
the bucket. `zero_grad(set_to_none=False)` writes zeros into the view, and autograd adds to them. That is
slower than the copy, because it writes the bucket twice: the zeros, and then the sums.

PyTorch's DistributedDataParallel is built on the same idea, and observes in the first step in which order
gradients come: Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704.
"""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from comm.collectives import Group, Work, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.timeline import span
from lab.units import MIB
from training.arguments import AccumulationArgs
from training.guard import Guard
from training.run import Run


def fill(parameters: Iterable[nn.Parameter], first_mb: float, bucket_mb: float) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets, in the given order; a change of dtype begins a new bucket.

    A bucket takes parameters until it has `bucket_mb` MiB (the first bucket: `first_mb`). So its last
    parameter may make it larger than that.
    """
    buckets: list[list[nn.Parameter]] = []
    space = 0.0
    for parameter in parameters:
        if not buckets or space <= 0 or parameter.dtype != buckets[-1][-1].dtype:
            space = MIB * (bucket_mb if buckets else first_mb)
            buckets.append([])
        buckets[-1].append(parameter)
        space -= parameter.nbytes
    return buckets


class Bucket:
    """A flat tensor that holds the gradients of some parameters, so that one message carries them all.

    flat      | gradient 4 |  gradient 3  | gradient 2 |      each of `views` is the place of one gradient

    `missing` holds the parameters whose gradient is not there yet.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        places = self.flat.split([p.numel() for p in parameters])
        # With the parameter's strides, because a fused optimizer pairs elements by their order in memory.
        self.views = {
            p: place.as_strided(p.shape, torch.empty_like(p).stride())
            for p, place in zip(parameters, places, strict=True)
        }
        self.missing = set(parameters)

    def move_in(self, parameter: nn.Parameter) -> None:
        """Make the gradient a view of this bucket; a gradient that this rank does not have is zero."""
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view


class BucketDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds, and averages its gradients over the ranks.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. With
    several microbatches, divide each one's sum of losses by the valid targets of the global batch / n
    (training/valid_targets.py), and run all but the last inside `no_sync()`.
    What is supported and refused is as in NaiveDataParallel (train_naive.py).
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group = None,
        pattern: str | None = None,
        bucket_mb: float = 1.0,
        first_mb: float = 0.25,
    ) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._guard = Guard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        filled = fill(reversed(self.trained), min(first_mb, bucket_mb), bucket_mb)
        self.buckets = [Bucket(parameters) for parameters in filled]
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.views}
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Prepare for the next backward: all gradients are missing, and no bucket is on its way."""
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
        self._to_launch = deque(self.buckets)
        self.in_flight: list[Work] = []
        self._guard.expect_gradients()

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Run all microbatches but the last inside: gradients add up in the buckets, and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Run as a hook when a backward has added its gradient of this parameter."""
        if not self._guard.note_arrival(parameter):
            return
        bucket = self._bucket_of[parameter]
        bucket.move_in(parameter)
        if self._guard.is_synchronising:
            bucket.missing.remove(parameter)
            # Ranks pair collectives by the order of the calls: a complete bucket waits for those before it.
            while self._to_launch and not self._to_launch[0].missing:
                self._launch(self._to_launch.popleft())

    def _launch(self, bucket: Bucket) -> None:
        """Start to average the bucket, and return while it travels: the backward continues."""
        for parameter in bucket.missing:  # not used on this rank, but other ranks may have
            bucket.move_in(parameter)
        work = all_reduce(bucket.flat, "mean", self.group, async_op=True, pattern=self.pattern)
        self.in_flight.append(work)

    def finish_gradient_sync(self) -> None:
        """Launch the buckets that no hook has launched, and wait for all of them."""
        while self._to_launch:
            self._launch(self._to_launch.popleft())
        for work in self.in_flight:
            work.wait()
        self._expect_gradients()


@dataclasses.dataclass
class BucketArgs(AccumulationArgs):
    """Bucket overlap: gradients travel in large messages while the backward computes."""

    bucket_mb: float = 1.0
    """Size in MiB at which a bucket takes no more parameters. For the first bucket it is at most 0.25."""


def traffic_per_step(model: BucketDataParallel, pattern: str) -> Traffic:
    """Return what this rank is expected to send in a step: one all-reduce for each bucket."""
    flats = [bucket.flat for bucket in model.buckets]
    sent = (expected_traffic("all_reduce", pattern, f.numel(), f.itemsize, model.group) for f in flats)
    return sum(sent, Traffic())


def main(cluster: Cluster, args: BucketArgs) -> None:
    run = Run(cluster, args, "data_parallel_bucket_overlap")
    model = BucketDataParallel(run.model(), pattern=run.pattern, bucket_mb=args.bucket_mb)
    optimizer = run.optimizer(model)
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
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        with span("forward", "forward"):
                            loss = loss_of(model(x), y, num_targets)
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
    run.finish(model, buckets=len(model.buckets), predicted_step_seconds=run.predicted_seconds)


if __name__ == "__main__":
    start(main, BucketArgs)
