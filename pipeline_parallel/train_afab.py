"""GPipe: all microbatches forward, then all backward (AFAB), and the ranks work at the same time.

      rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
      rank 1   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
      rank 2   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
               |bubble|                                  |bubble|

With n ranks and m microbatches a step takes (m + n - 1) (f + b) instead of m n (f + b):

      bubble        (n-1) / (m + n-1)       more microbatches, less idleness ...
      activations   m microbatches          ... and more memory, for all wait for their backward
      traffic       as naive model parallel's

Gradients add up over the microbatches, whose losses are divided by m: the step is that of one process on the
whole batch. After Huang et al., "GPipe", 2019, https://arxiv.org/abs/1811.06965.
"""

from comm.script import start
from lab.cluster import Cluster
from lab.timeline import span
from pipeline_parallel.run import Args, Run
from pipeline_parallel.schedules import gpipe


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "pipeline_afab")
    table = gpipe(cluster.world_size, args.microbatches)
    pipeline = run.pipeline(table, "gpipe")
    optimizer = run.optimizer(pipeline)
    for step in run.steps(pipeline, optimizer):
        x, y = run.batch(step)
        with run.step() as this:
            optimizer.zero_grad()
            outcome = pipeline.step(x, y)
            pipeline.finish_gradient_sync()
            with span("step", "optimizer"):
                optimizer.step()
            this.loss = run.loss(outcome)
        run.sent(pipeline.traffic_per_step())
    run.finish(pipeline)


if __name__ == "__main__":
    start(main, Args)
