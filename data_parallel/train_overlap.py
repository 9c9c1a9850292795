"""Overlap: all-reduce a gradient while the backward still computes the others.

      naive     |  forward  |     backward     |█ █ █ █ all-reduces █ █ █| step |

      overlap   |  forward  |     backward     |       | step |
                                |█ █ █ █ all-reduces █ █|
                                 └ started by hooks, one for each parameter, last layers first

A backward computes the gradients of the last layer first, long before those of the first layer. Each
parameter has a hook, which autograd calls when the gradient is complete. The hook starts an asynchronous
all-reduce. A communication thread carries it out while the backward goes on, and `finish_gradient_sync()`
waits for the rest. A step takes at least the following time. n, alpha and beta are as in train_naive.py, and
`first gradient` is the time from the start of the backward until the first gradient is complete:

      forward + max(backward, first gradient + sum of 2 (n-1) (alpha + (bytes/n) beta)) + optimizer

Overlap can hide all messages except for the last. But there are as many as before, each with a latency.
Buckets are the cure: train_bucket_overlap.py. See Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, section 3.2.3, https://arxiv.org/abs/2006.15704.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, Work, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from data_parallel.guard import ReplicaGuard, replace_hook
from data_parallel.ordered_launcher import OrderedLauncher
from data_parallel.run import Run
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.ledger import Traffic
from lab.trace.timeline import span
from training.arguments import AccumulationArgs


class OverlapDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds, and averages its gradients during the backward.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. With
    several microbatches, divide each loss by their number and run all but the last inside `no_sync()`.

    Ranks pair their collectives by the order of the calls. So all-reduces start in one order on all ranks,
    last registered parameter first, and a gradient that is complete earlier waits (ordered_launcher.py).

    What is supported and refused is as in NaiveDataParallel (train_naive.py).
    """

    def __init__(self, module: nn.Module, group: Group = None, pattern: str | None = None) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._guard = ReplicaGuard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._launcher = OrderedLauncher(len(self._trained), self._launch)
        self._in_flight: list[tuple[Tensor, Work]] = []
        for i, parameter in enumerate(self._trained):
            replace_hook(parameter, lambda _, i=i: self._on_gradient(i))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Run all microbatches but the last inside: gradients add up, and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, i: int) -> None:
        """Run as a hook in the backward: gradient i is complete, and holds the sum over microbatches."""
        parameter = self._trained[i]
        if not self._guard.has_gradient(parameter):
            return  # autograd also calls the hook where a backward has returned None
        if self._launcher.is_ready(i):
            # This is a second backward. That is right only if the first one's gradients were dropped.
            is_kept = bool(self._launcher.missing()) or parameter.grad is self._in_flight[i][0]
            self._guard.refuse_unless_dropped(parameter, is_kept)
            self._wait_for_all()
        if self._guard.is_synchronising:
            self._launcher.ready(i)

    def _launch(self, i: int) -> None:
        """Start to all-reduce gradient i, and return while it travels."""
        gradient = self._trained[i].grad
        assert gradient is not None
        with span("launch", "launch", lane="launches", bytes=gradient.nbytes):
            handle = all_reduce(gradient, op="mean", group=self.group, async_op=True, pattern=self.pattern)
        self._in_flight.append((gradient, handle))

    def _wait_for_all(self) -> None:
        """Wait for all gradients in flight, and prepare for the next backward."""
        for _, handle in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self._launcher.reset()

    def finish_gradient_sync(self) -> None:
        """Start the all-reduces that no hook has started, and wait for all of them.

        Where a rank did not use a parameter, it contributes zeros. A parameter that no rank used has no
        gradient.
        """
        unused = self._launcher.missing()
        device = self._trained[0].device if self._trained else None
        used = torch.ones(len(self._trained), dtype=torch.uint8, device=device)
        for i in unused:
            parameter = self._trained[i]
            if parameter.grad is None:  # it may have one from an earlier microbatch
                used[i].zero_()
                parameter.grad = torch.zeros_like(parameter)
            self._launcher.ready(i)
        all_reduce(used, op="max", group=self.group, pattern=self.pattern)  # after all gradients
        self._wait_for_all()
        for i in unused:
            if not used[i]:
                self._trained[i].grad = None
        self._guard.synchronised()


def traffic_per_step(model: OverlapDataParallel, pattern: str) -> Traffic:
    """Return this rank's expected traffic for a step: all gradients, and a flag for each parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [*((p.numel(), p.element_size()) for p in trained), (len(trained), 1)]
    return sum((expected_traffic("all_reduce", pattern, *size, model.group) for size in sizes), Traffic())


def main(cluster: Cluster, args: AccumulationArgs) -> None:
    run = Run(cluster, args, "data_parallel_overlap")
    model = OverlapDataParallel(run.model(), pattern=run.pattern)
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
    run.finish(model)


if __name__ == "__main__":
    start(main, AccumulationArgs)
