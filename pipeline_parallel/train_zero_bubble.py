"""Zero bubble: the backward is cut into two halves, and the half that no rank waits for fills the bubble.

      B = I and W        I: the gradient of the stage's input, for which the stage before waits
                         W: the gradients of the stage's weights, for which only the optimizer waits

      rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3       ZB-H1: the order of 1F1B, W put off
      rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
      rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

      --schedule    idle seconds of a rank      activations of a rank
      zb_h1         (p-1) (f + i - w)           p microbatches: what rank 0 holds in 1F1B
      zb_v          (p-1) i / 2                 2 p microbatches of stages of half the size
      dualpipe_v    (p-1) (f + i - w) / 2       2 p + 1 of these

f, i and w are the seconds of F, I and W; in 1F1B a rank is idle for (p-1) (f + i + w). These formulas are for
at least p (ZB-V: 2 p - 1, DualPipeV: 2 p) microbatches; analysis/theory.py has those for fewer. ZB-V gives
each rank two stages, in a V: down the ranks and up again, so rank 0 has the first and the last one. DualPipeV
does too, and puts each forward beside a backward of the rank's other stage, so that an overlap could hide the
communication within layers. The traffic is 1F1B's, and in a V that of interleaved 1F1B with two stages a
rank, less one boundary: the two middle stages are on one rank. --recompute saves little memory here, because
a W that was put off keeps the inputs of its layers anyway; in DualPipeV, which puts off p of them, half.

What to read, in this order:
  1. `zb_h1` in schedules.py: 1F1B's loops, with "FIW" or "FI" where 1F1B has "FB".
  2. deferred.py: autograd computes I and W in one node; here they become two.
  3. `main` below, which is train_1f1b.py's with another table.

Sources: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241; DeepSeek-AI,
"DeepSeek-V3 Technical Report", 2024, https://arxiv.org/abs/2412.19437.
"""

import dataclasses
from typing import Literal

from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from pipeline_parallel.script import Args, begin, figures


@dataclasses.dataclass
class ZeroBubbleArgs(Args):
    """Train a small GPT, cut into stages with split backwards, on the source of Python's standard library."""

    schedule: Literal["zb_h1", "zb_v", "dualpipe_v"] = "zb_h1"
    """Schedule: zb_h1 has one stage on each rank and 1F1B's memory; zb_v has two, in the shape of a V; so has
    dualpipe_v, which does forwards and backwards in pairs."""


def main(cluster: Cluster, args: ZeroBubbleArgs) -> None:
    run, model, options = begin(cluster, args, "pipeline_zero_bubble")
    p, m = cluster.world_size, args.microbatches
    pipeline = Pipeline(model, table_of(args.schedule, p, m), loss_of, balance=args.balance, **options)
    optimizer = run.optimizer(pipeline)
    for x, y in run.batches(pipeline, optimizer):
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        pipeline.finish_gradient_sync()  # of an embedding that two stages share
        optimizer.step()
        run.record(loss)  # None on ranks without the last stage
    n, fewest = {"zb_h1": (1, p), "zb_v": (2, 2 * p - 1), "dualpipe_v": (2, 2 * p)}[args.schedule]
    formula = (p - 1) / (3 * n * m + p - 1) if m >= fewest else None  # for f = i = w
    rows = figures(cluster, args, pipeline, x, y, bubble=formula)
    run.finish(pipeline, traffic=pipeline.traffic(), **rows)


if __name__ == "__main__":
    start(main, ZeroBubbleArgs)
