"""Local SGD: each rank trains H steps alone, and then the ranks average their parameters.

      rank 0   ── step ── step ── step ── step ──┐               ┌── step ── ...
      rank 1   ── step ── step ── step ── step ──┼── average ────┼── step ── ...
      rank 2   ── step ── step ── step ── step ──┘               └── step ── ...
               └───── H = 4 steps ─────┘

Data parallelism averages gradients, so it communicates in each step. Here the ranks communicate once in H
steps, and then send as many bytes. On average over H steps:

      bytes of a step     2 (n-1)/n P / H         P: bytes of all parameters, in a ring of n ranks
      time of a step      computing + time of the all-reduce / H

Between two averages each rank takes steps with the gradients of its own examples only, and the replicas
drift apart (data_parallel/train_alone.py). With H = 1 and plain SGD, which is linear in the gradient, this is
data parallelism. For n ranks that have the gradients g_i at the same parameters w

      mean of the ranks' parameters     1/n sum (w - lr g_i)  =  w - lr (1/n sum g_i)     data parallelism

With more steps the two differ, because a rank computes its second gradient where its own first step has led,
and the first steps of the other ranks have led elsewhere. AdamW, the default here, is not linear, so with it
even H = 1 is another training. Averaging parameters is not averaging gradients, and the larger H is, the less
a step learns.

The optimizer's state (momentum, Adam's two averages) comes from the gradients of one rank. By default each
rank keeps its own, and only parameters are sent. The state is an average over many steps anyway, and to send
it would double (momentum) or treble (Adam) the bytes. `average_state=True` averages the state, too.

A rank's loss is the mean over its own valid targets, because nothing is sent in a step. If ranks have unequal
numbers of them (--ignore-first), the ranks count equally, and not the targets.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, https://arxiv.org/abs/1805.09767; the
same idea as federated averaging, McMahan et al., AISTATS 2017. torch has `PeriodicModelAverager`.
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comm.collectives import Group, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from lab.trace.ledger import Traffic
from training.arguments import Args, NotOffered
from training.guard import guarded
from training.run import Run


@guarded
class LocalSGD(nn.Module):
    """Wraps a module that every rank of `group` trains alone, and averages its parameters every H steps.

    Call `after_step(optimizer)` after each step of the optimizer. With `average_state` what the optimizer
    keeps is averaged, too, element by element.

    Tied, frozen and unused parameters are supported: the optimizer of a rank that does not use a parameter
    leaves it as it is. Buffers become rank 0's at wrapping, and are not sent again.
    """

    def __init__(
        self, module: nn.Module, sync_every: int, group: Group = None, average_state: bool = False
    ) -> None:
        super().__init__()
        if sync_every < 1:
            raise WorkbookError(f"sync_every is {sync_every}: it is a number of steps, at least 1.")
        self.module, self.group = module, group
        self.sync_every = sync_every
        self.average_state, self.steps = average_state, 0  # steps since the last average
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    def after_step(self, optimizer: Optimizer, is_last: bool = False) -> bool:
        """Count a step; after `sync_every` of them, and after the last one, average and return True."""
        self.steps += 1
        if self.steps < self.sync_every and not is_last:
            return False
        self.average(optimizer)
        return True

    @torch.no_grad()
    def average(self, optimizer: Optimizer) -> None:
        """Replace what this rank trains by the mean over ranks, in one all-reduce."""
        tensors = self.averaged(optimizer)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        all_reduce(flat, "mean", self.group)
        for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
        self.steps = 0

    def averaged(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the tensors to average: the parameters, and with `average_state` what is kept of each.

        Raise WorkbookError if the optimizer has state of some parameters only: other ranks may have it of
        others.
        """
        tensors = [parameter.data for parameter in self.trained]
        states = [optimizer.state.get(parameter, {}) for parameter in self.trained]
        if not self.average_state or not any(states):
            return tensors
        if not all(states):
            raise WorkbookError(
                "A parameter has had no gradient on this rank, so the optimizer keeps no state of it to "
                "average: freeze what no rank uses, or leave average_state out."
            )
        kept = [(name, value) for state in states for name, value in state.items()]
        return tensors + [value for name, value in kept if name != "step"]  # each rank counts its own steps

    def traffic(self, optimizer: Optimizer) -> Traffic:
        """Return what a rank sends when the ranks average."""
        tensors = self.averaged(optimizer)
        numel, itemsize = sum(tensor.numel() for tensor in tensors), tensors[0].itemsize
        return expected_traffic("all_reduce", None, numel, itemsize, self.group)


@dataclasses.dataclass
class LocalArgs(Args):
    """Local SGD: each rank trains some steps alone, and then the ranks average their parameters."""

    sync_every: int = 8
    """Number H of steps that a rank trains alone before the ranks average."""
    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    """Optimizer of each rank."""
    checkpoint: NotOffered = None  # between two averages each rank has another model
    resume: NotOffered = None
    auto_resume: NotOffered = None
    metronome: NotOffered = None


@dataclasses.dataclass
class LocalSGDArgs(LocalArgs):
    """Local SGD: each rank trains some steps alone, and then the ranks average their parameters."""

    average_state: bool = False
    """Average the optimizer's state, too."""


def main(cluster: Cluster, args: LocalSGDArgs) -> None:
    run = Run(cluster, args, "local_sgd")
    model = LocalSGD(run.model(), args.sync_every, average_state=args.average_state)
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(x), y, run.own_targets)
        loss.backward()
        optimizer.step()
        model.after_step(optimizer, is_last=run.current_step == args.steps)
        run.record(loss)
    run.finish(model, traffic=model.traffic(optimizer), sync_every=args.sync_every)


if __name__ == "__main__":
    start(main, LocalSGDArgs)
