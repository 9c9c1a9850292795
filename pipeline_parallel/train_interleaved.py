"""Interleaved 1F1B: every rank has several small stages in place of a large one, and the bubble shrinks.

      layers     0 1 | 2 3 | 4 5 | 6 7              two ranks with one stage each would have 0 1 2 3 | 4 5 6 7
      stage       0     1     2     3
      rank        0     1     0     1               a microbatch visits each rank twice

      rank 0   F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
      rank 1   .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .

      (small letters: the second stage of a rank; each action takes half the time of 1F1B's)

At the beginning a rank waits until the first microbatch has come through the stages before its own, and at
the end until the last gradient has. These stages are v times smaller, and so is the time:

      bubble        (p-1) / (v m + p-1)    of the time, with p ranks, m >= p microbatches and v stages a rank
      activations   (v-1) p + 2 (p-1-rank) + 1 microbatches of small stages, if p divides m
      traffic       (v p - 1) / (p - 1) times that of 1F1B: there are v p - 1 boundaries instead of p - 1

Microbatches go in rounds of p. In a round each microbatch goes through the first stage of the rank, then each
goes through the second one, and so on; the backwards take the stages in the opposite order.

What to read, in this order:
  1. `one_f_one_b` in schedules.py, then `interleaved_1f1b`: the same three phases, over pairs of a microbatch
     and a stage.
  2. The docstring of pipeline.py: the same loop runs 1F1B.
  3. `main` below, which is train_1f1b.py's with another table.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021, section 2.2, https://arxiv.org/abs/2104.04473.
"""

import dataclasses

from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import interleaved_1f1b
from pipeline_parallel.script import Args, begin, figures


@dataclasses.dataclass
class InterleavedArgs(Args):
    """Train a small GPT, cut into several stages per rank, on the source of Python's standard library."""

    chunks: int = 2
    """Number of stages that each rank has."""
    layers: int = 16
    """Number of the GPT's blocks, whatever its --size. Eight ranks with two stages each need at least 14."""


def main(cluster: Cluster, args: InterleavedArgs) -> None:
    run, model, options = begin(cluster, args, "pipeline_interleaved")
    p, m, v = cluster.world_size, args.microbatches, args.chunks
    pipeline = Pipeline(model, interleaved_1f1b(p, m, v), loss_of, balance=args.balance, **options)
    optimizer = run.optimizer(pipeline)
    for x, y in run.batches(pipeline, optimizer):
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        pipeline.finish_gradient_sync()  # of an embedding that two stages share
        optimizer.step()
        run.record(loss)  # None on all ranks but the last
    formula = (p - 1) / (v * m + p - 1) if m >= p else None
    rows = figures(cluster, args, pipeline, x, y, bubble=formula)
    run.finish(pipeline, traffic=pipeline.traffic(), **rows)


if __name__ == "__main__":
    start(main, InterleavedArgs)
