"""GPipe: do all forwards, then all backwards (AFAB), so that the ranks work at the same time.

      rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---      F: forward of a microbatch
      rank 1   .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .       B: its backward, twice as long
      rank 2   .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .       .: idle for the time of a forward

With p ranks and m microbatches, where a forward takes f and a backward b, a step takes (m + p-1) (f + b),
and each rank is idle for (p-1) (f + b) of it. Naive model parallelism, with one microbatch at a time, takes
m p (f + b).

      bubble        (p-1) / (m + p-1): the idle share of a step; the more microbatches, the smaller
      activations   all m microbatches: each forward is done before the first backward (naive: 1 microbatch)
      traffic       that of naive model parallelism (train_model_parallel.py)

Each loss is divided by m, and gradients add up over the microbatches, so a step is that of one process on
the full batch. Source: Huang et al., "GPipe", 2019, https://arxiv.org/abs/1811.06965.
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
class AllForwardAllBackward:
    """Holds one rank's stage of the model, and runs the microbatches of a batch through it."""

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
    """Has `isend` and `irecv`: comm.point_to_point, or by_hand.py, which says which message has failed."""
    action: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """A context for each forward (named "F3") and backward ("B3"), which shows it in the timeline."""

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

        The first rank needs the batch's input `x`, and the last rank its targets `y`; they may be None
        elsewhere.
        """
        is_first, is_last = self.rank == 0, self.rank == self.ranks - 1
        losses, leaving = [], []
        kept = {}  # the stage's input, and its output or loss, whose graph holds the activations

        # All forwards.
        arriving = [] if is_first else self.post_receives(self.input_like, self.rank - 1)
        for i in range(self.microbatches):
            if is_first:
                given = x.chunk(self.microbatches)[i]
            else:
                given, transfer = arriving.pop(0)
                transfer.wait()
                given.requires_grad_()  # its gradient will be sent to the rank before
            with self.action(f"F{i}"):
                made = self.stage(given)
                if is_last:
                    made = self.loss_of(made, y.chunk(self.microbatches)[i]) / self.microbatches
                    losses.append(made.detach())
            if not is_last:
                leaving.append(self.messages.isend(made.detach(), self.rank + 1))
            kept[i] = given, made

        # All backwards, microbatches in the same order. Without a gradient, backward() starts from the loss.
        arriving = [] if is_last else self.post_receives(self.output_like, self.rank + 1)
        for i in range(self.microbatches):
            gradient = None
            if not is_last:
                gradient, transfer = arriving.pop(0)
                transfer.wait()
            given, made = kept.pop(i)
            with self.action(f"B{i}"):
                made.backward(gradient)
            if not is_first:
                leaving.append(self.messages.isend(given.grad, self.rank - 1))

        for transfer in leaving:  # a tensor must not change before it is sent
            transfer.wait()
        return torch.stack(losses).sum() if is_last else None

    @torch.no_grad()
    def forward_only(self, x: Tensor | None) -> Tensor | None:
        """Return the outputs for a batch, on the last rank: the forwards of `step`, for evaluation."""
        is_first, is_last = self.rank == 0, self.rank == self.ranks - 1
        outputs, leaving = [], []
        arriving = [] if is_first else self.post_receives(self.input_like, self.rank - 1)
        for i in range(self.microbatches):
            if is_first:
                given = x.chunk(self.microbatches)[i]
            else:
                given, transfer = arriving.pop(0)
                transfer.wait()
            with self.action(f"F{i}"):
                made = self.stage(given)
            if is_last:
                outputs.append(made)
            else:
                leaving.append(self.messages.isend(made, self.rank + 1))
        for transfer in leaving:
            transfer.wait()
        return torch.cat(outputs) if is_last else None

    def post_receives(self, like: Tensor, peer: int) -> list[tuple[Tensor, Any]]:
        """Post the receives of all microbatches at once, so that they arrive while this rank computes.

        A rank's k-th receive from a peer gets the peer's k-th send. On nccl, sends and receives between two
        ranks also run in the order of the calls, so gradients are only asked for after all activations are
        sent.
        """
        buffers = [torch.empty_like(like) for _ in range(self.microbatches)]
        return [(buffer, self.messages.irecv(buffer, peer)) for buffer in buffers]


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "pipeline_afab")
    pipeline = run.by_hand(AllForwardAllBackward, "gpipe")
    optimizer = run.optimizer(pipeline)
    with run.checkpointing(pipeline, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                outcome = pipeline.step(x, y)  # AllForwardAllBackward.step, on this rank's stage
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
