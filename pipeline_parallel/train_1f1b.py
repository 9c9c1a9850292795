"""1F1B: one forward, one backward, so that a microbatch's activations go as soon as they can.

      rank 0   F0 F1 F2 .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
      rank 1   .  F0 F1 .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .        the same bubble as GPipe,
      rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .        other memory

      bubble        (n-1) / (m + n-1)
      activations   at most n - rank microbatches, however many there are
      traffic       as naive model parallel's

Rank r begins with n-1-r forwards (warmup), then does one forward and one backward in turn (steady), and ends
with the backwards that are left (cooldown). So m can grow until the bubble is small. After Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", 2020 (PipeDream-Flush), https://arxiv.org/abs/2006.09503.
"""

from comm.script import start
from lab.cluster import Cluster
from lab.timeline import span
from pipeline_parallel.run import Args, Run
from pipeline_parallel.schedules import one_f_one_b


def main(cluster: Cluster, args: Args) -> None:
    run = Run(cluster, args, "pipeline_1f1b")
    table = one_f_one_b(cluster.world_size, args.microbatches)
    pipeline = run.pipeline(table, "1f1b")
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
    start(main, Args)
