"""Run the ranks' part of benchmarks/hybrid.py: a step of each lesson, and the same step on a mesh."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import side_by_side
from benchmarks.pipeline_steps import model_as_made, text
from comm.collectives import all_reduce, chosen_pattern
from context_parallel.parallel_model import ContextParallel
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_all_to_all_attention import all_to_all_attention
from context_parallel.train_ring_attention import ring_attention
from data_parallel.train_bucket_overlap import BucketDataParallel
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.train_moe import ExpertParallel
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import loss_of
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from tensor_parallel.parallelize import parallelize
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

WINDOWS = 8  # of text in a step, over all ranks
LESSONS = {  # by what is compared: the lesson's run mode
    "data": "bucket_overlap",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "tensor": "tensor_parallel",
    "sequence": "sequence_parallel",
    "pipeline": "1f1b",
    "context ring": "context_ring",
    "context all_to_all": "context_all_to_all",
    "experts": "expert_parallel",
}
Step = Callable[[], Tensor]  # returns the loss
LR = 1e-3
ATTENTIONS = {
    "context ring": (ring_attention, SequenceCut.zigzag),
    "context all_to_all": (all_to_all_attention, SequenceCut.contiguous),
}
MOE = MoEConfig(num_experts=4, top_k=2)
AUX_WEIGHT = 0.01


def sizes_of(what: str, ranks: int) -> ParallelSizes:
    """Return the sizes of the mesh on which one axis has all ranks."""
    if what == "pipeline":
        return ParallelSizes(pipeline=ranks, microbatches=WINDOWS)
    if what in ("tensor", "sequence"):
        return ParallelSizes(tensor=ranks, sequence_parallel=what == "sequence")
    if what.startswith("context "):
        return ParallelSizes(context=ranks, attention=what.removeprefix("context "))  # type: ignore[arg-type]
    if what == "experts":
        return ParallelSizes(data=ranks, expert_ranks=ranks)
    return ParallelSizes(data=ranks, zero={"zero1": 1, "zero2": 2, "zero3": 3}.get(what, 0))  # type: ignore[arg-type]


def batch_of(cluster: Cluster, what: str) -> tuple[Tensor, Tensor]:
    """Return this rank's examples: a slice of the batch along the data axis, else all of it."""
    x, y = text(WINDOWS)
    if sizes_of(what, cluster.world_size).data == 1:
        return x, y
    return x.chunk(cluster.world_size)[cluster.rank], y.chunk(cluster.world_size)[cluster.rank]


def on_a_mesh(cluster: Cluster, what: str) -> Step:
    """Return the step of train_hybrid.py."""
    sizes, (x, y) = sizes_of(what, cluster.world_size), batch_of(cluster, what)
    example = x[: len(x) // sizes.microbatches]
    experts = Experts(MOE, AUX_WEIGHT) if what == "experts" else None
    model = copy.deepcopy(model_as_made())
    hybrid = HybridParallel(model, Mesh(cluster, sizes), example, experts=experts, lr=LR)

    def step() -> Tensor:
        hybrid.optimizer.zero_grad()
        loss = hybrid.backward(x, y)
        hybrid.optimizer.step()
        return hybrid.mean_loss(loss)

    return step


def of_the_lesson(cluster: Cluster, what: str) -> Step:
    """Return the step of the lesson's script."""
    model, (x, y) = copy.deepcopy(model_as_made()), batch_of(cluster, what)
    if what == "pipeline":
        return _pipeline_step(cluster, model, x, y)
    pattern, loss_function = chosen_pattern("all_reduce"), loss_of
    if what in ("zero1", "zero2"):
        sharded = ZeroOptimizer if what == "zero1" else ZeroGradientOptimizer
        optimizer = finisher = sharded(model.parameters(), torch.optim.AdamW, pattern=pattern, lr=LR)
    else:
        if what in ("tensor", "sequence"):
            model = finisher = parallelize(model, sequence_parallel=what == "sequence")
            loss_function = model.loss
        elif what.startswith("context "):
            model = finisher = ContextParallel(model, *ATTENTIONS[what])
            loss_function = model.loss
        elif what == "experts":
            model = finisher = ExpertParallel(model, MOE, form_groups(cluster.world_size))
        else:
            wrapper = FullyShardedDataParallel if what == "zero3" else BucketDataParallel
            model = finisher = wrapper(model, pattern=pattern)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        balanced = loss + AUX_WEIGHT * model.auxiliary_loss() if what == "experts" else loss
        balanced.backward()
        finisher.finish_gradient_sync()
        optimizer.step()
        return _mean(loss, pattern)

    return step


def _pipeline_step(cluster: Cluster, model: torch.nn.Module, x: Tensor, y: Tensor) -> Step:
    table = table_of("1f1b", cluster.world_size, WINDOWS)
    pipeline = Pipeline(model, table, loss_of, x[:1])
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LR)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = pipeline.step(x, y)
        pipeline.finish_gradient_sync()
        optimizer.step()
        loss = torch.zeros(()) if loss is None else loss
        return _mean(loss, chosen_pattern("all_reduce"))

    return step


def _mean(loss: Tensor, pattern: str) -> Tensor:
    """Reduce the loss as training.run does for the report: return its mean over ranks."""
    mean = loss.detach().float().clone()
    all_reduce(mean, op="mean", pattern=pattern)
    return mean


def alternate(
    cluster: Cluster, what: Sequence[str], runs: int, warmup: int
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each step "on a mesh" and "of the lesson" on this rank."""
    seconds = {}
    for one in what:
        variants = {"mesh": on_a_mesh(cluster, one), "lesson": of_the_lesson(cluster, one)}
        seconds[one] = side_by_side.alternate(variants, runs, warmup=warmup)
    return seconds
