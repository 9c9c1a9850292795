"""Naive data parallel: every rank has the same model and a slice of the batch, and gradients are averaged.

      rank 0   slice 0 ─► forward ─► backward ─► gradient ─┐               ┌─► step
      rank 1   slice 1 ─► forward ─► backward ─► gradient ─┼─ all-reduce ──┼─► step     the same step
      rank 2   slice 2 ─► forward ─► backward ─► gradient ─┘     mean      └─► step

Three things make it equal to one process with the full batch, up to rounding: all ranks start from rank 0's
weights, the slices are equal in size and together are the batch, and each gradient is the *mean* over ranks.
So every rank takes the same step, and the replicas stay equal bit for bit. Weights are sent once, at the
start. (A layer that looks at the whole batch, such as BatchNorm, sees the rank's slice only.)

It is naive because communication starts when all computing is done, with an all-reduce for each parameter.
For n ranks in a ring, with a latency of alpha seconds and beta seconds per byte (comm/cost.py):

      time for the gradients of a step = sum over parameters of 2 (n-1) (alpha + (bytes/n) beta)

Overlap hides this time behind the backward (train_overlap.py), and buckets save latencies
(train_bucket_overlap.py). See Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, https://arxiv.org/abs/2006.15704.
"""

from typing import Any

import torch
from torch import nn

from comm.collectives import Group, all_reduce, broadcast
from comm.cost import expected_traffic
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.trace.ledger import Traffic
from training.arguments import Args
from training.guard import guarded
from training.run import Run


@guarded  # refuses what would train wrongly (training/guard.py); without it the class does the same
class NaiveDataParallel(nn.Module):
    """Wraps a module that every rank of `group` holds, and averages its gradients over the ranks.

    Call `finish_gradient_sync()` after the last backward: then every `param.grad` is the mean over ranks.
    Divide the sum of losses of each batch or microbatch by `num_targets`, which is V / n: V valid targets in
    the global batch, n ranks (training/valid_targets.py).

    Tied, frozen and unused parameters are supported; unused ones get zero gradients. Buffers become rank 0's
    at wrapping, and are not sent again (DDP sends rank 0's before every forward). All ranks must have the
    same number of batches (sampler.py).
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__()
        self.module, self.group = module, group
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(tensor.data, root=0, group=group)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    def finish_gradient_sync(self) -> None:
        """Average the gradients, parameter by parameter."""
        for parameter in self.trained:
            if parameter.grad is None:  # not used here: all ranks must call all_reduce, so send zeros
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, "mean", self.group)

    def traffic(self) -> Traffic:
        """Return what a rank sends in a step; in a ring 2 (n-1) messages for each parameter."""
        sent = (expected_traffic("all_reduce", None, p.numel(), p.itemsize, self.group) for p in self.trained)
        return sum(sent, Traffic())


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "data_parallel_naive")
    model = NaiveDataParallel(run.model())
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(x), y, run.num_targets)
        loss.backward()
        model.finish_gradient_sync()
        optimizer.step()
        run.record(loss)
    run.finish(model, traffic=model.traffic())


if __name__ == "__main__":
    start(main, Args)
