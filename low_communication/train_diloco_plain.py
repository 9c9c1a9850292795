"""DiLoCo: each rank trains H steps alone, and an outer optimizer takes a step with the ranks' mean change.

      anchor ──┬── rank 0: H steps of AdamW ──► change ──┐
               ├── rank 1: H steps of AdamW ──► change ──┼── mean ──► outer step ──► the new anchor, on all
               └── rank 2: H steps of AdamW ──► change ──┘

The *anchor* is where all ranks began this round: the parameters after the last outer step. A rank's change,
anchor - parameters, plays the part of a gradient. Its mean over the ranks goes into an outer optimizer, SGD
with Nesterov momentum, which has the same state on all ranks:

      momentum = mu momentum + change
      anchor   = anchor - outer_lr (change + mu momentum)          with the new momentum

With outer_lr 1 and no momentum the new anchor is the mean of the parameters: local SGD (train_local_sgd.py).
The state of a rank's own optimizer is never sent. The result is not that of one process with the global
batch, except for H = 1, SGD without momentum on the ranks, outer_lr 1 and outer_momentum 0.

      bytes of a step     2 (n-1)/n P / H on average; P: bytes of the trained parameters, n ranks in a ring
      memory of a rank    2 P more: the anchor and its momentum; and 2 P for a moment in an outer step

train_diloco.py sends the change in fragments, while the training goes on, and in 8 or 16 bits.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
https://arxiv.org/abs/2311.08105.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from comm.collectives import Group, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.trace.ledger import Traffic
from low_communication.train_local_sgd import LocalArgs
from training.guard import guarded
from training.run import Run
from training.validate import refuse_if


@guarded
class DiLoCo(nn.Module):
    """Wraps a module that every rank of `group` trains alone, and moves it by outer steps.

    Call `outer_step()` after every H-th step of the rank's own optimizer. Tied, frozen and unused parameters
    are supported. Buffers become rank 0's at wrapping, and are not sent again.
    """

    takes_loads = False  # the anchor would stay as it was

    def __init__(
        self, module: nn.Module, group: Group = None, outer_lr: float = 0.7, outer_momentum: float = 0.9
    ) -> None:
        super().__init__()
        self.module, self.group = module, group
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.anchor = self.flat()
        self.outer = torch.optim.SGD([self.anchor], outer_lr, outer_momentum, nesterov=outer_momentum > 0)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    def flat(self) -> Tensor:
        """Return a copy of the parameters as they are now, as one flat tensor."""
        return torch.cat([parameter.detach().flatten() for parameter in self.trained])

    def outer_step(self) -> None:
        """Step the outer optimizer with the ranks' mean change, and copy the anchor into the parameters."""
        change = self.anchor - self.flat()  # not the reverse: an optimizer subtracts
        all_reduce(change, "mean", self.group)
        self.anchor.grad = change
        self.outer.step()
        self.anchor.grad = None
        values = self.anchor.split([parameter.numel() for parameter in self.trained])
        for parameter, its_values in zip(self.trained, values, strict=True):
            parameter.data.copy_(its_values.view_as(parameter))

    def traffic(self) -> Traffic:
        """Return what a rank sends in an outer step."""
        return expected_traffic("all_reduce", None, self.anchor.numel(), self.anchor.itemsize, self.group)


@dataclasses.dataclass
class DiLoCoArgs(LocalArgs):
    """DiLoCo: each rank trains some steps alone, and an outer optimizer takes a step with the mean change."""

    steps: int = 64
    """Number of steps of each rank's own optimizer: a multiple of --sync-every."""
    sync_every: int = 32
    """Number H of steps between two outer steps."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, a number. 1 without momentum gives local SGD."""
    outer_momentum: float = 0.9
    """Momentum of the outer optimizer: a number from 0 to less than 1."""

    def validate(self, world_size: int) -> None:
        h, lr, mu = self.sync_every, self.outer_lr, self.outer_momentum
        refuse_if(h < 1 or self.steps % h, f"--steps {self.steps} must be a multiple of --sync-every {h}.")
        refuse_if(not 0 < lr < math.inf, f"--outer-lr {lr}: it is a number above 0.")
        refuse_if(not 0 <= mu < 1, f"--outer-momentum {mu}: it is a number from 0, and less than 1.")


def main(cluster: Cluster, args: DiLoCoArgs) -> None:
    run = Run(cluster, args, "diloco_plain")
    model = DiLoCo(run.model(), None, args.outer_lr, args.outer_momentum)
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(x), y, run.own_targets)
        loss.backward()
        optimizer.step()
        if run.current_step % args.sync_every == 0:
            model.outer_step()
        run.record(loss)
    run.finish(model, traffic=model.traffic(), sync_every=args.sync_every)


if __name__ == "__main__":
    start(main, DiLoCoArgs)
