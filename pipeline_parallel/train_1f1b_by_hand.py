"""1F1B by hand: do one forward and one backward in turn, so that a microbatch's activations are freed early.

      rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---      F: forward of a microbatch
      rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .       B: its backward, twice as long
      rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .       .: idle for the time of a forward

Rank r of p ranks begins with p-1-r forwards, one for each rank after it (warmup). Then it does one forward
and one backward in turn (steady state), and at the end the backwards that are left (cooldown). On rank 0
above, the warmup is F0 F1, the steady state is F2 B0 F3 B1, and the cooldown is B2 B3.

In GPipe all backwards come after all forwards. Here a backward comes as soon as its gradient can be here, and
it frees the activations of its microbatch before the next forward makes new ones:

      bubble        (p-1) / (m + p-1)      of the time, with m microbatches: as in GPipe
      activations   p-r microbatches at most, where GPipe holds m
      traffic       that of GPipe

So with more microbatches of the same size, a larger batch, the bubble shrinks and the memory stays. There is
no deadlock: a send does not block, and what a rank waits for never needs what that rank does later.

Only the order differs from GPipe, which has `forward_of` and `backward_of` (train_afab.py). The next script,
train_1f1b.py, runs the same order from a table, and so any other order, too.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush),
https://arxiv.org/abs/2006.09503.
"""

from torch import Tensor

from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.script import Args, begin, figures
from pipeline_parallel.stage import balanced_stages
from pipeline_parallel.train_afab import AllForwardAllBackward


class OneForwardOneBackward(AllForwardAllBackward):
    """Holds one rank's stage of the model, and runs microbatches through it in the order of 1F1B."""

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Add the gradients of a batch to the parameters' gradients. The last rank returns the loss."""
        self.begin_step(x, y)
        m = self.microbatches
        warmup = min(self.last - self.rank, m)  # a forward for each rank after this one
        for i in range(warmup):
            self.forward_of(i)
        for i in range(warmup, m):  # steady state
            self.forward_of(i)
            self.backward_of(i - warmup)
        for i in range(m - warmup, m):  # cooldown
            self.backward_of(i)
        return self.end_step()


def main(cluster: Cluster, args: Args) -> None:
    run, model, options = begin(cluster, args, "pipeline_1f1b_by_hand")
    p, m = cluster.world_size, args.microbatches
    pipeline = OneForwardOneBackward(balanced_stages(model, p, args.balance), m, loss_of, **options)
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
