"""Interleaved 1F1B: every rank has several small stages instead of a large one, and the bubble shrinks.

      layers     0 1 | 2 3 | 4 5 | 6 7              2 ranks with one stage each:   0 1 2 3 | 4 5 6 7
      rank        0     1     0     1               with two: a microbatch passes every rank twice

A rank waits at the beginning and at the end until the first, or the last, microbatch has come through the
others, and these are v times faster through their small stages:

      bubble        (n-1) / (v m + n-1)     with v stages (chunks) on each rank
      activations   a little more than 1F1B: v (n - rank) + n - 1 - rank small stages, about
      traffic       2 v - 1 times that of 1F1B, for there are v n - 1 boundaries instead of n - 1

Microbatches go in rounds of n: a round passes a rank's first stage, then its second one, and so on. After
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
https://arxiv.org/abs/2104.04473.
"""

import dataclasses

from comm.script import start
from lab.cluster import Cluster
from lab.timeline import span
from pipeline_parallel.run import ChunkedArgs, Run
from pipeline_parallel.schedules import interleaved_1f1b


@dataclasses.dataclass
class InterleavedArgs(ChunkedArgs):
    """Train a small GPT on the source of Python's standard library, cut into several stages for each rank."""

    layers: int = 16
    """Number of the GPT's blocks, whatever its --size. Eight ranks with two stages each need at least 14."""


def main(cluster: Cluster, args: InterleavedArgs) -> None:
    run = Run(cluster, args, "pipeline_interleaved")
    table = interleaved_1f1b(cluster.world_size, args.microbatches, args.chunks)
    pipeline = run.pipeline(table, "interleaved")
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
    start(main, InterleavedArgs)
