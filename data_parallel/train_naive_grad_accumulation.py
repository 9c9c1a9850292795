"""Gradient accumulation: add up the gradients of several microbatches, and all-reduce them once.

      rank 0   fwd bwd │ fwd bwd │ fwd bwd │ all-reduce │ step        a step with 3 microbatches
      rank 1   fwd bwd │ fwd bwd │ fwd bwd │ all-reduce │ step
                  └────────┴─────────┴── gradients add up in param.grad

Only one microbatch has activations in memory, so the batch can be larger than the memory allows at once. The
all-reduce is paid once in a step, however many microbatches there are. With N microbatches, and n,
alpha and beta as in train_naive.py:

      step = N (forward + backward) + sum over parameters of 2 (n-1) (alpha + (bytes/n) beta) + optimizer

Autograd adds gradients up. To get those of the *mean* loss, each microbatch's sum of losses is divided by the
valid targets of the global batch / n, because the all-reduce takes a mean over n ranks. Valid targets are
those that are not -100 (training/valid_targets.py). Two mistakes are hard to see in the loss. If each
microbatch's own mean is its loss, gradients are N times too large: with SGD that is a learning rate N times
too large, while Adam hides it. And an all-reduce after every microbatch sends N times the bytes for the same
gradients.
"""

import dataclasses

import torch
from torch import Tensor, nn

from comm.script import start
from data_parallel.train_naive import NaiveDataParallel, traffic_per_step
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.models.text import microbatches
from lab.trace.timeline import span
from training.arguments import AccumulationArgs
from training.run import Run
from training.valid_targets import count_valid


@dataclasses.dataclass
class Args(AccumulationArgs):
    """Train with naive data parallel and gradient accumulation."""

    batch_size: int = 48
    """Number of windows of text in a step, over all ranks and microbatches: a multiple of ranks times
    microbatches."""
    grad_acc_steps: int = 2
    """Number of microbatches in a step: their gradients add up, and are reduced once."""


def accumulate(
    model: nn.Module, parts: list[tuple[Tensor, Tensor]], num_targets: float | None = None
) -> Tensor:
    """Add up the gradients of a step's microbatches in the parameters, and return the loss of all of them.

    A microbatch is a pair (x, y). The loss is the mean over `num_targets` valid targets, by default those of
    the microbatches, and the gradients are those of this loss. It has no graph.
    """
    num_targets = num_targets or sum(count_valid(y) for _, y in parts)
    total = torch.zeros((), device=parts[0][0].device)
    for x, y in parts:
        with span("forward", "forward"):
            loss = loss_of(model(x), y, num_targets)
        with span("backward", "backward"):
            loss.backward()
        total += loss.detach()
    return total


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "data_parallel_naive_grad_accumulation")
    model = NaiveDataParallel(run.model(), pattern=run.pattern)
    optimizer = run.optimizer(model)
    with run.checkpointing(model, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            parts = microbatches(x, y, args.grad_acc_steps)
            with run.step() as record:
                optimizer.zero_grad()
                total = accumulate(model, parts, run.valid_targets(y))
                model.finish_gradient_sync()
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(total)
            run.expect_traffic(traffic_per_step(model, run.pattern))
            run.evaluate(step, model)
            run.stop_if_asked(step)
    run.finish(model, predicted_step_seconds=run.predicted_seconds)


if __name__ == "__main__":
    start(main, Args)
