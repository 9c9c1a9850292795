"""GPipe: do all forwards, then all backwards (AFAB), so that the ranks work at the same time.

      rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---      F: forward of a microbatch
      rank 1   .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .       B: its backward, twice as long
      rank 2   .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .       .: idle for the time of a forward

With p ranks, m microbatches, a forward of f seconds and a backward of b, a step takes (m + p-1) (f + b), if
stages take equally long and messages no time. A rank is idle for (p-1) (f + b) of it. (Naive: m p (f + b).)

      bubble        (p-1) / (m + p-1): the idle share of a step; the more microbatches, the smaller
      activations   all m microbatches: each forward is done before the first backward (naive: 1 microbatch)
      traffic       m activations to the next rank, m gradients to the one before, each of a microbatch

A loss is multiplied by its microbatch's share of the valid targets (1/m, if none is ignored), and gradients
add up over microbatches, so a step is that of one process. `AllForwardAllBackward` has all actions of a rank.
stage.py cuts the model; own_stages.py has what any pipeline needs: shapes, tied weights, evaluation, state.
Source: Huang et al., "GPipe", 2019, https://arxiv.org/abs/1811.06965.
"""

from torch import Tensor

from comm.point_to_point import AnyTransfer, isend, recv
from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.own_stages import OwnStages
from pipeline_parallel.script import Args, begin, figures
from pipeline_parallel.stage import balanced_stages


class AllForwardAllBackward(OwnStages):
    """Holds one rank's stage of the model, and runs microbatches through it. Rank r has stage r."""

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Add up a batch's gradients. The first rank uses `x`, and the last uses `y` and returns the loss."""
        self.begin_step(x, y)
        for i in range(self.microbatches):
            self.forward_of(i)
        for i in range(self.microbatches):
            self.backward_of(i)
        return self.end_step()

    def begin_step(self, x: Tensor, y: Tensor, num_targets: float | None = None) -> None:
        super().begin_step(x, y, num_targets)
        # For each microbatch the stage's input, and its output, whose graph holds the activations.
        self.kept: dict[int, tuple] = {}
        self.leaving: dict[int, AnyTransfer] = {}  # the activations that are being sent
        self.returning: list[AnyTransfer] = []  # the last gradient that was sent

    def forward_of(self, i: int) -> None:
        """Receive the activation of microbatch i, compute the stage, and send the result on."""
        rank = self.rank
        stage = self.stages[str(rank)]
        given = self.xs[i]
        if rank > 0:
            given = self.buffer_for(rank)
            recv(given, rank - 1, self.up)  # `up`, `down`: the groups of messages in each direction
            given.requires_grad_()  # its gradient will be sent to the rank before
        if rank == self.last:
            made = stage(given, self.ys[i]) * self.shares[i]  # its share of the loss
            self.losses.append(made.detach())
        else:
            made = stage(given)
            self.leaving[i] = isend(made.detach().contiguous(), rank + 1, self.up)  # do not wait, but go on
        self.kept[i] = given, made

    def backward_of(self, i: int) -> None:
        """Receive the gradient of the stage's output, go backward, and send the gradient of its input."""
        given, made = self.kept.pop(i)
        rank, gradient = self.rank, None
        if rank < self.last:  # on the last rank `made` is the loss, and `backward(None)` starts there
            gradient = self.buffer_for(rank + 1)
            recv(gradient, rank + 1, self.down)
            self.leaving.pop(i).wait()  # returns at once: its gradient is here, so it has arrived
        made.backward(gradient)
        if rank > 0:
            for transfer in self.returning:  # the gradient before, so that only one is kept
                transfer.wait()
            self.returning = [isend(self.gradient_of(given), rank - 1, self.down)]

    def end_step(self) -> Tensor | None:
        for transfer in (*self.leaving.values(), *self.returning):  # they must stay until they are sent
            transfer.wait()
        return super().end_step()


def main(cluster: Cluster, args: Args) -> None:
    run, model, options = begin(cluster, args, "pipeline_afab")
    p, m = cluster.world_size, args.microbatches
    pipeline = AllForwardAllBackward(balanced_stages(model, p, args.balance), m, loss_of, **options)
    optimizer = run.optimizer(pipeline)
    for x, y in run.batches(pipeline, optimizer):
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        pipeline.finish_gradient_sync()  # of an embedding that two stages share
        optimizer.step()
        run.record(loss)  # None on all ranks but the last
    rows = figures(cluster, args, pipeline, x, y, bubble=(p - 1) / (m + p - 1))
    run.finish(pipeline, traffic=pipeline.traffic(), **rows)


if __name__ == "__main__":
    start(main, Args)
