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
only saves memory; `--microbatches 1` sends the full batch through the stages at once. The next script,
train_afab.py, lets the ranks work at the same time.

`ModelParallel.step` is all of it, written by hand. stage.py cuts the model, and own_stages.py has what any
pipeline needs around a step: shapes, tied weights, evaluation, the full state.
Source: Huang et al., "GPipe", 2019, figure 2b, https://arxiv.org/abs/1811.06965.
"""

from torch import Tensor

from comm.point_to_point import recv, send
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.script import Args, begin, figures
from pipeline_parallel.stage import balanced_stages


class ModelParallel(OwnStages):
    """Holds one rank's stage of the model, and runs batches through it. Rank r has stage r."""

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

        The first rank uses the batch's input `x`, and the last rank its targets `y`.
        """
        self.begin_step(x, y)
        rank, stage = self.rank, self.stages[str(self.rank)]
        for i in range(self.microbatches):
            # Receive. Autograd has to compute the gradient of what was received: it is sent back later.
            given = self.xs[i]
            if rank > 0:
                given = self.buffer_for(rank)
                recv(given, rank - 1, self.up)
                given.requires_grad_()

            # Forward. A microbatch has a share of the loss: 1/m, or less if some of its targets are ignored.
            # Send, and receive the gradient of what was sent. Meanwhile the ranks after this one work.
            gradient = None
            if rank == self.last:
                made = stage(given, self.ys[i]) * self.shares[i]
                self.losses.append(made.detach())
            else:
                made = stage(given)
                send(made.detach().contiguous(), rank + 1, self.up)
                gradient = self.buffer_for(rank + 1)
                recv(gradient, rank + 1, self.down)

            # Backward, which frees this microbatch's activations, and send.
            made.backward(gradient)
            if rank > 0:
                send(self.gradient_of(given), rank - 1, self.down)
        return self.end_step()


def main(cluster: Cluster, args: Args) -> None:
    run, model, options = begin(cluster, args, "pipeline_model_parallel")
    p, m = cluster.world_size, args.microbatches
    pipeline = ModelParallel(balanced_stages(model, p, args.balance), m, loss_of, **options)
    optimizer = run.optimizer(pipeline)
    for x, y in run.batches(pipeline, optimizer):
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        pipeline.finish_gradient_sync()  # of an embedding that two stages share
        optimizer.step()
        run.record(loss)  # None on all ranks but the last
    rows = figures(cluster, args, pipeline, x, y, bubble=(p - 1) / p)
    run.finish(pipeline, traffic=pipeline.traffic(), **rows)


if __name__ == "__main__":
    start(main, Args)
