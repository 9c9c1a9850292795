"""Train with pipeline, data, context, tensor and expert parallelism at once, on one mesh of ranks.

    torchrun --nproc-per-node=8 hybrid_parallel/train_hybrid.py
    bash scripts/launch_training.sh --config configs/config.yaml

      8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)

               stage 0                  stage 1
               tensor 0   tensor 1      tensor 0   tensor 1
      data 0   rank 0     rank 1        rank 4     rank 5
      data 1   rank 2     rank 3        rank 6     rank 7

What to read, in this order:
  1. mesh.py: which ranks form which group, and why the axes have this order.
  2. hybrid.py: `HybridParallel` puts the classes of the other lessons around one model, each with its group.
  3. clipping.py: the norm of all gradients, in which each number counts once.
  4. traffic.py: what each axis sends in a step.
  5. `train` below, which is the loop of the other lessons.
  6. After lessons 6 and 7, context_axis.py, which cuts sequences, and expert_axis.py, which divides experts.

sizes.py says which sizes make sense together.
"""

from collections.abc import Callable
from typing import Any

import torch

from comm.script import start
from hybrid_parallel.arguments import HybridArgs, model_of, moe_of, sizes_of
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh, coordinates_of, drawn, stream_of
from hybrid_parallel.planner.auto import read_arguments
from hybrid_parallel.report import AxesReport, drawn_traffic
from hybrid_parallel.sizes import refuse_sizes
from hybrid_parallel.traffic import traffic_of_axes
from lab.cluster import Cluster
from training.run import Run


def begin(cluster: Cluster, args: HybridArgs, run_mode: str) -> tuple[Run, HybridParallel]:
    """Return the run and the model on the mesh, and print the mesh and what each axis sends."""
    sizes = sizes_of(args, cluster.world_size)
    refuse_sizes(sizes, model_of(args), args.batch_size, cluster.world_size, args.experts)
    share = coordinates_of(cluster.rank, sizes)["data"], sizes.data
    stream = stream_of(cluster.rank, sizes)
    run = Run(cluster, args, run_mode, share=share, stream=stream, same_weights=sizes.pipeline > 1)
    run.not_measured = "the axes share a rank's time, and their spans overlap"
    x, _ = run.batch(0)
    example = x[: len(x) // sizes.microbatches]
    moe = moe_of(args)
    experts = None if moe is None else Experts(moe, args.aux_weight, args.seed)
    mesh = Mesh(cluster, sizes)
    hybrid = HybridParallel(run.model(), mesh, example, torch.optim.AdamW, experts, lr=args.lr)
    sent = drawn_traffic(hybrid, traffic_of_axes(hybrid, args.clip is not None))
    if cluster.is_main and not args.json:
        print("\n".join([drawn(sizes), "", sent]), flush=True)
    return run, hybrid


def main(cluster: Cluster, args: HybridArgs) -> None:
    run, hybrid = begin(cluster, args, "hybrid")
    train(run, hybrid, args)


def train(
    run: Run,
    hybrid: HybridParallel,
    args: HybridArgs,
    before_step: Callable[[int], None] = lambda step: None,
    **more_rows: Any,
) -> None:
    """Train to the end, from the last checkpoint if the arguments say so, and report."""
    axes = AxesReport(run, hybrid, args.clip is not None)
    for x, y in run.batches(hybrid, hybrid.optimizer):
        before_step(run.current_step - 1)
        hybrid.optimizer.zero_grad()
        loss = hybrid.backward(x, y, hybrid.share_of(run.num_targets, y) if args.ignore_first else None)
        if args.clip is not None:
            hybrid.clip_grad_norm_(args.clip)
        hybrid.optimizer.step()
        hybrid.after_step(is_last=run.current_step == args.steps)
        run.record(loss, traffic=axes.of_step())
    run.finish(hybrid, **axes.rows(), **more_rows)


if __name__ == "__main__":
    start(main, HybridArgs, read=read_arguments)
