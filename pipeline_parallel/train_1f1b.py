"""1F1B from a table: a schedule is data, and one loop runs any schedule.

      rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---      F: forward of a microbatch
      rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .       B: its backward, twice as long
      rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .       .: idle for the time of a forward

train_1f1b_by_hand.py has this order in three loops: p-1-rank forwards (warmup), one forward and one backward
in turn (steady state), and the backwards that are left (cooldown). Here the same loops make a table, with the
actions of each rank in order. What is derived from the table, or done with it, need not know 1F1B: the
messages, the proof that it cannot deadlock, the simulated timeline, the run.

      bubble        (p-1) / (m + p-1)      of the time, with p ranks and m microbatches: as in GPipe
      activations   p - rank microbatches at most, where GPipe holds m
      traffic       that of GPipe

The executor also posts each receive before the message is needed, so messages travel while ranks compute.

What to read, in this order:
  1. `one_f_one_b` in schedules.py: the table above, made by three short loops, one for each phase.
  2. The docstring of pipeline.py, then `Pipeline.step`: one loop runs any table, on the stages of stage.py
     and own_stages.py. messages.py says what it sends.
  3. `main` below. `pipeline.step` runs the table on a batch.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush),
https://arxiv.org/abs/2006.09503.
"""

from comm.script import start
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import one_f_one_b
from pipeline_parallel.script import Args, begin, figures


def main(cluster: Cluster, args: Args) -> None:
    run, model, options = begin(cluster, args, "pipeline_1f1b")
    p, m = cluster.world_size, args.microbatches
    pipeline = Pipeline(model, one_f_one_b(p, m), loss_of, balance=args.balance, **options)
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
