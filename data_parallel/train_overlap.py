"""Overlap: reduce a gradient while the backward still computes the next ones.

      naive     |  forward  |     backward     |█ █ █ █ all-reduces █ █ █| step |

      overlap   |  forward  |     backward     |       | step |
                                |█ █ █ █ all-reduces █ █|
                                 └ in hooks, one for each parameter, last layers first

The backward finishes the last layer's gradients first, long before the first layer's. A hook on each
parameter runs when its gradient is complete and starts an asynchronous all-reduce, which the
communication thread works off while the backward goes on. `finish_gradient_sync()` waits for what is
left.

      step = forward + max(backward, first gradient ready + sum of 2 (n-1) (alpha + bytes/n beta)) + optimizer

A step can lose all its waiting and none of its latencies: there are as many messages as before. Buckets cure
that, see train_bucket_overlap.py. The idea is as old as layer-wise gradients; for PyTorch see Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from comm import cost
from comm.collectives import Group, Work, all_reduce, broadcast
from comm.script import start
from data_parallel.guard import ReplicaGuard, replace_hook
from data_parallel.ordered_launcher import OrderedLauncher
from data_parallel.run import Run
from lab.cluster import Cluster
from lab.ledger import Traffic
from lab.model import loss_of
from lab.text import microbatches
from lab.timeline import span
from training.arguments import AccumulationArgs


class OverlapDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds; any shapes, tied, frozen and unused parameters.

    Call `finish_gradient_sync()` after the backward: then every `param.grad` is the mean over ranks. Of
    several microbatches, divide each one's loss by their number and run all but the last inside
    `no_sync()`. Collectives start in the reverse order of registration on all ranks, whatever the order
    of the hooks.

    What it does not do: send buffers again (they become rank 0's here, then each rank has its own; DDP sends
    rank 0's before every forward), reduce sparse gradients, train parameters that are unfrozen, replaced,
    cast or added later (wrap again; guard.py), or let a rank have fewer batches (see sampler.py).
    """

    def __init__(self, module: nn.Module, group: Group = None, pattern: str | None = None) -> None:
        super().__init__()
        self.module, self.group, self.pattern = module, group, pattern
        self._guard = ReplicaGuard(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._order = OrderedLauncher(len(self._trained), self._launch)
        self._in_flight: list[tuple[Tensor, Work]] = []
        for i, parameter in enumerate(self._trained):
            replace_hook(parameter, lambda _, i=i: self._on_gradient(i))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        self._guard.before_forward()
        return self.module(*inputs, **named_inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all but the last microbatch: gradients add up on this rank and nothing is sent."""
        return self._guard.no_sync()

    def _on_gradient(self, i: int) -> None:
        """The gradient of parameter i is complete: that of this microbatch and of those before it."""
        parameter = self._trained[i]
        if not self._guard.has_gradient(parameter):
            return
        if self._order.is_ready(i):
            is_kept = bool(self._order.missing()) or parameter.grad is self._in_flight[i][0]
            self._guard.refuse_unless_dropped(parameter, is_kept)
            self._wait()
        if self._guard.is_synchronising:
            self._order.ready(i)

    def _launch(self, i: int) -> None:
        gradient = self._trained[i].grad
        assert gradient is not None
        with span("launch", "launch", lane="launches", bytes=gradient.nbytes):
            handle = all_reduce(gradient, op="mean", group=self.group, async_op=True, pattern=self.pattern)
        self._in_flight.append((gradient, handle))

    def _wait(self) -> None:
        for _, handle in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self._order.reset()

    def finish_gradient_sync(self) -> None:
        """Start what no hook has started, and wait for all of it.

        A parameter that only some ranks used counts as zero on the others; one that no rank used has no
        gradient afterwards.
        """
        unused = self._order.missing()
        used = torch.ones(len(self._trained), dtype=torch.uint8)
        for i in unused:
            parameter = self._trained[i]
            used[i] = parameter.grad is not None  # from an earlier microbatch
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._order.ready(i)
        used = used.to(self._trained[0].device) if self._trained else used
        all_reduce(used, op="max", group=self.group, pattern=self.pattern)  # takes its turn behind the others
        self._wait()
        for i in unused:
            if not used[i]:
                self._trained[i].grad = None
        self._guard.synchronised()


def traffic_per_step(cluster: Cluster, model: nn.Module, pattern: str) -> Traffic:
    """What the formula says this rank sends for a step's gradients: every one, then which are used."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [*((p.numel(), p.element_size()) for p in trained), (len(trained), 1)]
    place = (cluster.world_size, cluster.rank)
    return sum((cost.per_rank("all_reduce", pattern, *size, *place) for size in sizes), Traffic())


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
            run.expect_traffic(traffic_per_step(cluster, model, run.pattern))
            run.stop_if_asked(step)
    run.finish(model)


if __name__ == "__main__":
    start(main, AccumulationArgs)
