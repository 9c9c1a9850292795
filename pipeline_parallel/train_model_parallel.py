"""Naive model parallel: the layers are cut among the ranks, and one rank works at a time.

      rank 0   F0 .  .  .  .  .  B0 B0 F1 .  .  .  ...      F a microbatch's forward, B its backward, twice
      rank 1   .  F0 .  .  B0 B0 .  .  .  F1 .  .  ...      as long; a dot is a forward's time of idleness
      rank 2   .  .  F0 B0 .  .  .  .  .  .  F1 B1 ...

A model that fits on no device alone can be trained so, at the speed of one: each rank holds an n-th of the
parameters, gradients, optimizer state and activations, and is idle for (n-1)/n of the time. What is sent is
little: one activation forward and one gradient back over each boundary between ranks,

      traffic of a rank in a step   2 * batch * time * width * 4 bytes, half of it on the first and last rank

Microbatches alone change nothing here, for each waits until the one before is all done. That all of them go
in at once is the next lesson, train_afab.py. The bubble: Huang et al., "GPipe", 2019, figure 2b,
https://arxiv.org/abs/1811.06965.
"""

from comm.script import start
from lab.cluster import Cluster
from lab.timeline import span
from pipeline_parallel.run import Args, Run
from pipeline_parallel.schedules import naive


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "pipeline_model_parallel")
    table = naive(cluster.world_size, args.microbatches)
    pipeline = run.pipeline(table, "naive")
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
