"""Train with pipeline, data, context, tensor and expert parallelism at once, on one mesh of ranks.

    torchrun --nproc-per-node=8 hybrid_parallel/train_hybrid.py
    bash scripts/launch_training.sh --config configs/config.yaml

      8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)

                  stage 0                  stage 1
                  tensor 0   tensor 1      tensor 0   tensor 1
      replica 0   rank 0     rank 1        rank 4     rank 5
      replica 1   rank 2     rank 3        rank 6     rank 7

What to read, in this order:
  1. mesh.py: which ranks form which group, and why the axes have this order.
  2. hybrid.py: `HybridParallel` puts the classes of the other lessons around one model, each with its group.
  3. clipping.py: the norm of all gradients, in which each number counts once.
  4. traffic.py: what each axis sends in a step.
  5. `main` below, which is the loop of the other lessons.
  6. After lessons 6 and 7, context_axis.py, which cuts sequences, and expert_axis.py, which divides experts.

sizes.py says which sizes make sense together.
"""

from comm.script import start
from hybrid_parallel.arguments import HybridArgs
from hybrid_parallel.planner.auto import read_arguments
from hybrid_parallel.run import Run
from hybrid_parallel.traffic import traffic_of_axes
from lab.cluster import Cluster
from lab.trace.timeline import span


def main(cluster: Cluster, args: HybridArgs) -> None:
    run = Run(cluster, args)
    hybrid = run.hybrid()
    with run.checkpointing(hybrid, hybrid.optimizer) as first:
        for step in range(first, args.steps):
            x, y = run.batch(step)
            with run.step() as record:
                hybrid.optimizer.zero_grad()
                loss = hybrid.backward(x, y)
                if args.clip is not None:
                    hybrid.clip_grad_norm_(args.clip)
                with span("step", "optimizer"):
                    hybrid.optimizer.step()
                record.loss = run.mean_loss(loss)
            run.expect_traffic_of_axes(traffic_of_axes(hybrid, is_clipped=args.clip is not None))
            run.evaluate(step, hybrid.module)
            run.save_if_due(step)
            run.stop_if_asked(step)
    run.finish(hybrid.module)


if __name__ == "__main__":
    start(main, HybridArgs, read=read_arguments)
