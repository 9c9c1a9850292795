"""Train with pipeline, data, context, tensor and expert parallelism at once, on one mesh of ranks.

    torchrun --nproc-per-node=8 hybrid_parallel/train_hybrid.py
    bash scripts/launch_training.sh --config configs/config.yaml

      8 ranks = 2 (pipeline) x 2 (data) x 2 (tensor)

               stage 0                  stage 1
               tensor 0   tensor 1      tensor 0   tensor 1
      data 0   rank 0     rank 1        rank 4     rank 5
      data 1   rank 2     rank 3        rank 6     rank 7

`put_on_mesh` lets the techniques of all lessons work on one model, each with its group of the mesh:

      HybridParallel        replicas: buckets, ZeRO, local SGD, compressed gradients      hybrid.py
        PipelineStages      this rank's stages; or OneStage                               stages.py
          TensorParallel    layers are divided, also in experts                           lesson 3
            ExpertModel     some experts in place of each MLP; or ModelOnRank             expert_axis.py
              GPT or MLP    ContextAxis changes its attention, for a part of the tokens   context_axis.py

Each of them answers for its own axis (which part of the state it has, which gradients it counts) and hands on
to what it wraps.

What to read, in this order:
  1. mesh.py: which ranks form which group, and why the axes have this order.
  2. `put_on_mesh` below, training/model_on_rank.py and stages.py: what each class answers for.
  3. hybrid.py: the replicas, and in which order the gradients of a step are completed.
  4. traffic.py: what each axis sends in a step.
  5. `train` below, which is the loop of the other scripts.
  6. After lessons 6 and 7, context_axis.py, which cuts sequences, and expert_axis.py, which divides experts.

sizes.py says which sizes make sense together.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from comm.script import start
from hybrid_parallel.arguments import HybridArgs, model_of, moe_of, sizes_of
from hybrid_parallel.context_axis import ContextAxis
from hybrid_parallel.expert_axis import ExpertModel, Experts
from hybrid_parallel.hybrid import HybridParallel, OptimizerClass
from hybrid_parallel.mesh import Mesh, coordinates_of, drawn_mesh, stream_of
from hybrid_parallel.planner.auto import read_arguments
from hybrid_parallel.report import AxesReport, drawn_traffic
from hybrid_parallel.sizes import refuse_sizes
from hybrid_parallel.stages import OneStage, PipelineStages
from hybrid_parallel.traffic import traffic_of_axes
from lab.cluster import Cluster
from lab.models.blocks import recompute_blocks
from lab.models.model import GPT, MLP, GPTConfig, MLPConfig
from tensor_parallel.parallelize import parallelize
from training.model_on_rank import ModelOnRank
from training.run import Run


def put_on_mesh(
    model: GPT | MLP,
    mesh: Mesh,
    example: Tensor,
    optimizer_class: OptimizerClass = torch.optim.AdamW,
    experts: Experts | None = None,
    **options: Any,
) -> HybridParallel:
    """Divide a GPT or an MLP among the ranks of `mesh`, in the way that `mesh.sizes` says.

    All ranks must give a `model` of the same shape, and the ranks of a pipeline group also the same weights:
    along the other axes the first rank's weights are copied. `example` is one microbatch of the input, with
    full sequences. `experts` take the places of a GPT's MLPs. The optimizer is an `optimizer_class` with
    `options`.
    """
    sizes, length = mesh.sizes, example.shape[1]
    batch_size, num_experts = len(example) * sizes.data * sizes.microbatches, 1
    if experts is not None:
        num_experts = experts.moe.num_experts
    config: GPTConfig | MLPConfig
    if isinstance(model, MLP):
        config = MLPConfig(len(model.layers), model.sizes[1])
    else:
        config = replace(model.config, block_size=length)
    refuse_sizes(sizes, config, batch_size, dist.get_world_size(), num_experts)

    gpt, layers = cast(GPT, model), ModelOnRank(model)  # refuse_sizes knows what an MLP has not
    if experts is not None:  # first, because the tensor axis divides what is in an expert, too
        layers = ExpertModel(gpt, experts, mesh.form_expert_groups(), sizes.microbatches)
    if sizes.tensor > 1:
        layers = parallelize(layers, mesh.tensor, sizes.sequence_parallel)
    context = None
    if sizes.context > 1:  # after the tensor axis, which puts other attention layers in
        context = ContextAxis(gpt, mesh.context, sizes, length)
    example = example if context is None else context.own(example)
    if sizes.recompute and sizes.pipeline == 1:
        recompute_blocks(model)  # the stages of a pipeline compute theirs again on their own
    stages = (
        OneStage(layers) if sizes.pipeline == 1 else PipelineStages(layers, sizes, example, mesh.pipeline)
    )
    return HybridParallel(stages, mesh, context, example, optimizer_class, **options)


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
    hybrid = put_on_mesh(run.model(), mesh, example, torch.optim.AdamW, experts, lr=args.lr)
    sent = drawn_traffic(hybrid, traffic_of_axes(hybrid, args.clip is not None))
    if cluster.is_main and not args.json:
        print("\n".join([drawn_mesh(sizes), "", sent]), flush=True)
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
        loss = hybrid.backward(x, y, run.num_targets)
        if args.clip is not None:
            hybrid.clip_grad_norm_(args.clip)
        hybrid.optimizer.step()
        hybrid.after_step(is_last=run.current_step == args.steps)
        run.record(loss, traffic=axes.of_step())
    run.finish(hybrid, **axes.rows(), **more_rows)


if __name__ == "__main__":
    start(main, HybridArgs, read=read_arguments)
