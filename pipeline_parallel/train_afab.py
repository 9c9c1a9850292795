"""GPipe: do all forwards, then all backwards (AFAB), so that the ranks work at the same time.

      rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---      F: forward of a microbatch
      rank 1   .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .       B: its backward, twice as long
      rank 2   .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .       .: idle for the time of a forward

With p ranks and m microbatches, where a forward takes f and a backward b, a step takes (m + p-1) (f + b),
and each rank is idle for (p-1) (f + b) of it. Naive model parallelism, with one microbatch at a time, takes
m p (f + b).

      bubble        (p-1) / (m + p-1): the idle share of a step; the more microbatches, the smaller
      activations   all m microbatches: each forward is done before the first backward (naive: 1 microbatch)
      traffic       m activations to the next rank, m gradients to the one before

A loss is multiplied by its microbatch's share of the targets, 1/m, and gradients add up over microbatches, so
a step is that of one process. `AllForwardAllBackward.step` is all of it, written by hand. balance.py cuts the
model; own_stages.py has what any pipeline needs around a step: shapes, tied weights, evaluation, the state.
Source: Huang et al., "GPipe", 2019, https://arxiv.org/abs/1811.06965.
"""

import torch
from torch import Tensor

from comm.point_to_point import isend, recv
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.trace.timeline import span
from pipeline_parallel.balance import balanced_stages
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.script import Args, begin, figures, on_all_ranks


class AllForwardAllBackward(OwnStages):
    """Holds one rank's stage of the model, and runs microbatches through it. Rank r has stage r."""

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

        The first rank uses the batch's input `x`, and the last rank its targets `y`.
        """
        self.begin_step(x, y)
        rank, stage, m = self.rank, self.stages[str(self.rank)], self.microbatches
        is_first, is_last = rank == 0, rank == self.last
        losses, leaving = [], []
        kept = []  # of each microbatch: the stage's input, and its output, whose graph holds the activations

        # All forwards.
        for i, (x_i, y_i) in enumerate(zip(x.chunk(m), y.chunk(m), strict=True)):
            given = x_i
            if not is_first:
                given = self.room_for(rank)
                recv(given, rank - 1)
                given.requires_grad_()  # its gradient will be sent to the rank before
            with span(str(i), "forward", action="F", microbatch=i, stage=rank):
                made = stage(given, y_i) * self.shares[i] if is_last else stage(given)
            if is_last:
                losses.append(made.detach())
            else:  # send, and go on with the next microbatch
                leaving.append(isend(made.detach().contiguous(), rank + 1))
            kept.append((given, made))

        # All backwards. On the last rank `made` is the loss, and `backward(None)` starts there.
        for i in range(m):
            (given, made), gradient = kept[i], None
            if not is_last:
                gradient = self.room_for(rank + 1)
                recv(gradient, rank + 1)
            with span(str(i), "backward", action="B", microbatch=i, stage=rank):
                made.backward(gradient)
            kept[i] = None  # free the activations
            if not is_first:
                leaving.append(isend(given.grad, rank - 1))

        for transfer in leaving:  # a tensor must not change before it is sent
            transfer.wait()
        return torch.stack(losses).sum() if is_last else None


def main(cluster: Cluster, args: Args) -> None:
    run, model, options = begin(cluster, args, "pipeline_afab")
    p, m = cluster.world_size, args.microbatches
    pipeline = AllForwardAllBackward(balanced_stages(model, p, args.balance), m, loss_of, **options)
    optimizer = run.optimizer(pipeline)
    with run.checkpointing(pipeline, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                loss = pipeline.step(x, y)
                pipeline.finish_gradient_sync()  # of an embedding that two stages share
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.mean_loss(on_all_ranks(loss, pipeline))
            run.expect_traffic(pipeline.traffic_per_step())
            run.evaluate(step, pipeline)
            run.stop_if_asked(step)
    run.finish(pipeline, **figures(cluster, args, pipeline, x, y), bubble_formula=(p - 1) / (m + p - 1))


if __name__ == "__main__":
    start(main, Args)
