"""Zero bubble: the backward is cut in two, and the half nobody waits for fills the bubble.

      B = I and W        I, the input's gradient: the stage before waits for it
                         W, the weights' gradient: only the optimizer waits for it

      rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 I3 W3       zb_h1: 1F1B's order, W put off
      rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
      rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

      --schedule    bubble (seconds idle)       activations
      zb_h1         (n-1) (f + i - w)           n microbatches: 1F1B's on rank 0, on all ranks
      zb_v          (n-1) i / 2                 2 n of half-sized stages

where f, i and w are the times of F, I and W; 1F1B's bubble is (n-1) (f + i + w). zb_v gives each rank two
stages, in a V: rank 0 has the first and the last one. --recompute saves little here, for a W put off keeps
its layers' inputs anyway. How autograd is brought to compute the halves apart stands in deferred.py. After
Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.
"""

import dataclasses
from typing import Literal

from comm.script import start
from lab.cluster import Cluster
from lab.timeline import span
from pipeline_parallel.run import Args, Run
from pipeline_parallel.schedules import zb_h1, zb_v


@dataclasses.dataclass
class ZeroBubbleArgs(Args):
    """Train a small GPT on the source of Python's standard library, cut into stages, the backward in two."""

    schedule: Literal["zb_h1", "zb_v"] = "zb_h1"
    """Schedule: zb_h1 has one stage on each rank and 1F1B's memory; zb_v has two, in the shape of a V."""


def main(cluster: Cluster, args: ZeroBubbleArgs) -> None:
    run = Run(cluster, args, "pipeline_zero_bubble")
    schedule = {"zb_h1": zb_h1, "zb_v": zb_v}[args.schedule]
    table = schedule(cluster.world_size, args.microbatches)
    pipeline = run.pipeline(table, args.schedule)
    optimizer = run.optimizer(pipeline)
    with run.checkpointing(pipeline, optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                optimizer.zero_grad()
                outcome = pipeline.step(x, y)
                pipeline.finish_gradient_sync()
                with span("step", "optimizer"):
                    optimizer.step()
                record.loss = run.loss(outcome)
            run.expect_traffic(pipeline.traffic_per_step())
            run.stop_if_asked(step)
    run.finish(pipeline)


if __name__ == "__main__":
    start(main, ZeroBubbleArgs)
