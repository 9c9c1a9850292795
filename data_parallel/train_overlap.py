"""Overlap: all-reduce a gradient while the backward still computes the others.

      naive     |  forward  |     backward     |█ █ █ █ all-reduces █ █ █| step |

      overlap   |  forward  |     backward     |       | step |
                                |█ █ █ █ all-reduces █ █|
                                 └ started by hooks, one for each parameter, last layers first

A backward computes the gradients of the last layer first, long before those of the first layer. Each
parameter has a hook, which autograd calls when the gradient is complete. The hook starts an asynchronous
all-reduce. A communication thread carries it out while the backward continues, and `finish_gradient_sync()`
waits for the rest. A step takes at least the following time. n, alpha and beta are as in train_naive.py, and
`first gradient` is the time from the start of the backward until the first gradient is complete:

      forward + max(backward, first gradient + sum of 2 (n-1) (alpha + (bytes/n) beta)) + optimizer

Ranks pair their all-reduces by the order of the calls, and would otherwise average different gradients
together. So all ranks start them in one order, which is about that of the backward: the last registered
parameter first. A gradient that is complete earlier waits for those before it:

      order      0   1   2   3   4          complete so far: 0, 2, 3
                 ■   □   ■   ■   □          started: 0; when 1 is complete, 1, 2 and 3 start

Overlap can hide all messages except for the last. But there are as many as before, each with a latency.
Buckets are the cure: train_bucket_overlap.py. See Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, section 3.2.3, https://arxiv.org/abs/2006.15704.
"""

import contextlib
from collections import deque
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
from training.arguments import AccumulationArgs
from training.guard import Guard
from training.run import Run


class OverlapDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds, and averages its gradients during the backward.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. With
    several microbatches, divide each one's sum of losses by the valid targets of the global batch / n
    (training/valid_targets.py), and run all but the last inside `no_sync()`.
    What is supported and refused is as in NaiveDataParallel (train_naive.py).
    """

    def __init__(self, module: nn.Module, group: Group = None, pattern: str | None = None) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._guard = Guard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Prepare for the next backward: no gradient is complete, and none is on its way."""
        self._to_launch = deque(reversed(self.trained))
        self._complete: set[nn.Parameter] = set()
        self.in_flight: list[Work] = []
        self._guard.expect_gradients()

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Run all microbatches but the last inside: gradients add up, and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Run as a hook in the backward: this gradient is complete, and holds the sum over microbatches."""
        if not self._guard.note_arrival(parameter) or not self._guard.is_synchronising:
            return
        self._complete.add(parameter)
        # Ranks pair all-reduces by the order of the calls: a complete gradient waits for those before it.
        while self._to_launch and self._to_launch[0] in self._complete:
            self._launch(self._to_launch.popleft())

    def _launch(self, parameter: nn.Parameter) -> None:
        """Start to average a gradient, and return while it travels: the backward continues."""
        if parameter.grad is None:  # this rank did not use it, but other ranks may have
            parameter.grad = torch.zeros_like(parameter)
        work = all_reduce(parameter.grad, "mean", self.group, async_op=True, pattern=self.pattern)
        self.in_flight.append(work)

    def finish_gradient_sync(self) -> None:
        """Start the all-reduces that no hook has started, and wait for all of them."""
        while self._to_launch:
            self._launch(self._to_launch.popleft())
        for work in self.in_flight:
            work.wait()
        self._expect_gradients()


def traffic_per_step(model: OverlapDataParallel, pattern: str) -> Traffic:
    """Return what this rank is expected to send in a step: one all-reduce for each trained parameter."""
    sent = (
        expected_traffic("all_reduce", pattern, p.numel(), p.itemsize, model.group) for p in model.trained
    )
    return sum(sent, Traffic())


def main(cluster: Cluster, args: AccumulationArgs) -> None:
    run = Run(cluster, args, "data_parallel_overlap")
    model = OverlapDataParallel(run.model(), pattern=run.pattern)
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
    run.finish(model, predicted_step_seconds=run.predicted_seconds)


if __name__ == "__main__":
    start(main, AccumulationArgs)
