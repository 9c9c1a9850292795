"""Naive model parallelism: divide the layers among the ranks, of which one computes at a time.

      rank 0   F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---      F: forward of a microbatch
      rank 1   .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1--- .  .       B: its backward, twice as long
      rank 2   .  .  F0 B0--- .  .  .  .  .  .  F1 B1--- .  .  .  .       .: idle for the time of a forward

A model that is too large for one device can be trained in this way, at the speed of one device. Each of the
p ranks holds a stage: some of the layers, with their gradients, optimizer state and activations.

      forward    receive the activation from the rank before, compute, send the result to the rank after
      backward   receive the gradient of that result, compute, send the gradient of the activation back

      bubble        (p-1) / p: the share of the time in which a rank is idle
      activations   one microbatch
      traffic       2 * batch * time * width * 4 bytes a step for a rank; half of it for the first and last

The batch is divided into microbatches, and each one waits until the one before has come back. Here that
only saves memory; `--microbatches 1` sends the full batch through the stages at once. The next lesson,
train_afab.py, lets the ranks work at the same time. Source: Huang et al., "GPipe", 2019, figure 2b,
https://arxiv.org/abs/1811.06965.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from comm import point_to_point
from comm.script import start
from lab.cluster import Cluster
from lab.trace.timeline import span
from pipeline_parallel.run import Args, Run


@dataclasses.dataclass
class ModelParallel:
    """Holds one rank's stage of the model, and runs batches through it."""

    stage: Callable[[Tensor], Tensor]
    """This rank's layers."""
    loss_of: Callable[[Tensor, Tensor], Tensor]
    """The mean loss of the model's output and its targets, for the last rank."""
    microbatches: int
    rank: int
    ranks: int
    input_like: Tensor | None
    """A tensor with the shape and dtype of the stage's input for a microbatch; None on the first rank."""
    output_like: Tensor | None
    """A tensor with the shape and dtype of the stage's output for a microbatch; None on the last rank."""
    messages: Any = point_to_point
    """Has `send` and `recv`: comm.point_to_point, or by_hand.py, which says which message has failed."""
    action: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """A context for each forward (named "F3") and backward ("B3"), which shows it in the timeline."""

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

        The first rank needs the batch's input `x`, and the last rank its targets `y`; they may be None
        elsewhere.
        """
        is_first, is_last = self.rank == 0, self.rank == self.ranks - 1
        losses = []
        for i in range(self.microbatches):
            # Receive. Autograd has to compute the gradient of what was received: it is sent back later.
            if is_first:
                given = x.chunk(self.microbatches)[i]
            else:
                given = torch.empty_like(self.input_like)
                self.messages.recv(given, self.rank - 1)
                given.requires_grad_()

            # Forward. The mean over the batch is the mean over the microbatches' means.
            with self.action(f"F{i}"):
                made = self.stage(given)
                if is_last:
                    made = self.loss_of(made, y.chunk(self.microbatches)[i]) / self.microbatches
                    losses.append(made.detach())

            # Send, and receive the gradient of what was sent. Meanwhile the ranks after this one work.
            gradient = None
            if not is_last:
                self.messages.send(made.detach(), self.rank + 1)
                gradient = torch.empty_like(self.output_like)
                self.messages.recv(gradient, self.rank + 1)

            # Backward, which frees this microbatch's activations, and send.
            with self.action(f"B{i}"):
                made.backward(gradient)
            if not is_first:
                self.messages.send(given.grad, self.rank - 1)
        return torch.stack(losses).sum() if is_last else None

    @torch.no_grad()
    def forward_only(self, x: Tensor | None) -> Tensor | None:
        """Return the outputs for a batch, on the last rank: forwards alone, to evaluate the stages.

        No gradient comes back. So a rank goes on with the next microbatch when it has sent one, and the ranks
        work at the same time.
        """
        is_first, is_last = self.rank == 0, self.rank == self.ranks - 1
        outputs = []
        for i in range(self.microbatches):
            if is_first:
                given = x.chunk(self.microbatches)[i]
            else:
                given = torch.empty_like(self.input_like)
                self.messages.recv(given, self.rank - 1)
            with self.action(f"F{i}"):
                made = self.stage(given)
            if is_last:
                outputs.append(made)
            else:
                self.messages.send(made, self.rank + 1)
        return torch.cat(outputs) if is_last else None


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "pipeline_model_parallel")
    pipeline = run.by_hand(ModelParallel, "naive")
    optimizer = run.optimizer(pipeline)
    with run.checkpointing(pipeline, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                outcome = pipeline.step(x, y)  # ModelParallel.step, on this rank's stage
                pipeline.finish_gradient_sync()  # of parameters that two stages share
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.loss(outcome)
            run.expect_traffic(pipeline.traffic_per_step())
            run.evaluate(step, pipeline)
            run.stop_if_asked(step)
    run.finish(pipeline)


if __name__ == "__main__":
    start(main, Args)
