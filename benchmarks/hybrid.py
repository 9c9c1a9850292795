"""Compare a training step on a mesh with that of the one lesson, where one axis has all ranks.

    python benchmarks/hybrid.py                     a table; --json for one JSON line
    python benchmarks/hybrid.py --quick             fewer runs, 2 ranks only

2 and 4 ranks train a GPT of 6.4 million parameters on 8 windows of 128 tokens. In the row `experts`, 4
experts take the place of each MLP. Both sides do what their scripts do in a step, with AdamW and the mean
loss for the report. They take turns in the same processes, step by step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks import side_by_side
from benchmarks.context_parallel import ATTENTIONS
from benchmarks.data_parallel import replicas
from benchmarks.pipeline import CONFIG
from benchmarks.side_by_side import Batch, Rows, Seconds, Training, medians, new_gpt, row, tokens
from comm.collectives import all_reduce
from context_parallel.parallel_model import ContextParallel
from expert_parallel.config import MoEConfig, form_groups
from expert_parallel.train_moe import ExpertParallel
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.models.model import loss_of
from lab.ranks import run_ranks
from low_communication.train_compressed import CompressedDataParallel
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from tensor_parallel.parallelize import parallelize

WINDOWS = 8  # of text in a step, over all ranks
LESSONS: dict[str, tuple[str, dict[str, Any]]] = {  # the lesson's run mode, and the mesh; 0 is all ranks
    "data": ("bucket_overlap", {"data": 0}),
    "data int8": ("data_parallel_compressed", {"data": 0, "compress": "int8"}),
    "zero1": ("zero1", {"data": 0, "zero": 1}),
    "zero2": ("zero2", {"data": 0, "zero": 2}),
    "zero3": ("zero3", {"data": 0, "zero": 3}),
    "tensor": ("tensor_parallel", {"tensor": 0}),
    "sequence": ("sequence_parallel", {"tensor": 0, "sequence_parallel": True}),
    "pipeline": ("1f1b", {"pipeline": 0, "microbatches": WINDOWS}),
    "context ring": ("context_ring", {"context": 0, "attention": "ring"}),
    "context all_to_all": ("context_all_to_all", {"context": 0, "attention": "all_to_all"}),
    "experts": ("expert_parallel", {"data": 0, "expert_ranks": 0}),
}
Step = Callable[[], Tensor]  # returns the loss
LR = 1e-3
MOE = MoEConfig(num_experts=4, top_k=2)
AUX_WEIGHT = 0.01


def sizes_of(what: str, ranks: int) -> ParallelSizes:
    """Return the sizes of the mesh on which one axis has all ranks."""
    return ParallelSizes(**{name: size or ranks for name, size in LESSONS[what][1].items()})


def batch_of(cluster: Cluster, what: str) -> Batch:
    """Return this rank's examples: a slice of the batch along the data axis, else all of it."""
    x, y = tokens(CONFIG, WINDOWS)
    n = sizes_of(what, cluster.world_size).data
    return x.chunk(n)[cluster.rank % n], y.chunk(n)[cluster.rank % n]


def on_a_mesh(cluster: Cluster, what: str) -> Step:
    """Return the step of train_hybrid.py."""
    sizes, (x, y) = sizes_of(what, cluster.world_size), batch_of(cluster, what)
    experts = Experts(MOE, AUX_WEIGHT) if what == "experts" else None
    mesh, example = Mesh(cluster, sizes), x[: len(x) // sizes.microbatches]
    hybrid = put_on_mesh(new_gpt(CONFIG), mesh, example, experts=experts, lr=LR)

    def step() -> Tensor:
        hybrid.optimizer.zero_grad()
        loss = hybrid.backward(x, y)
        hybrid.optimizer.step()
        return hybrid.mean_loss(loss)

    return step


def of_the_lesson(cluster: Cluster, what: str) -> Step:
    """Return the step of the lesson's script."""
    model, (x, y) = new_gpt(CONFIG), batch_of(cluster, what)
    train: Step
    if what == "pipeline":
        train = _pipeline(cluster, model, (x, y))
    elif what == "experts":
        train = _experts(cluster, model, (x, y))
    elif what in ("tensor", "sequence"):
        divided = parallelize(model, sequence_parallel=what == "sequence")
        train = Training(divided, AdamW(divided.parameters(), lr=LR), (x, y))
    elif what == "data int8":
        compressed = CompressedDataParallel(model, "int8")
        train = Training(compressed, AdamW(compressed.parameters(), lr=LR), (x, y))
    elif what.startswith("context "):
        cut = ContextParallel(model, *ATTENTIONS[what.removeprefix("context ")])
        train = Training(cut, AdamW(cut.parameters(), lr=LR), (x, y))
    else:
        train = replicas(LESSONS[what][0], model, (x, y), bucket_mb=1.0 if what == "data" else 4.0)

    def step() -> Tensor:
        mean = train().float()  # as training.run does for the report
        all_reduce(mean, op="mean")
        return mean

    return step


def _pipeline(cluster: Cluster, model: torch.nn.Module, batch: Batch) -> Step:
    pipeline = Pipeline(model, table_of("1f1b", cluster.world_size, WINDOWS), loss_of, batch[0][:1])
    optimizer = AdamW(pipeline.parameters(), lr=LR)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = pipeline.step(*batch)
        pipeline.finish_gradient_sync()
        optimizer.step()
        return torch.zeros(()) if loss is None else loss.detach().clone()

    return step


def _experts(cluster: Cluster, module: torch.nn.Module, batch: Batch) -> Step:
    model = ExpertParallel(module, MOE, form_groups(cluster.world_size))
    optimizer = AdamW(model.parameters(), lr=LR)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch[0]), batch[1])
        (loss + AUX_WEIGHT * model.auxiliary_loss()).backward()
        model.finish_gradient_sync()
        optimizer.step()
        return loss.detach()

    return step


def alternate(cluster: Cluster, runs: int, warmup: int) -> dict[str, Seconds]:
    """Return the seconds of each step on the "mesh" and of the "lesson" on this rank."""
    seconds = {}
    for what in LESSONS:
        variants = {"mesh": on_a_mesh(cluster, what), "lesson": of_the_lesson(cluster, what)}
        seconds[what] = side_by_side.alternate(variants, runs, warmup=warmup)
    return seconds


def rows_of(ranks: int, runs: int, warmup: int) -> Rows:
    """Return a row for each lesson."""
    by_rank = run_ranks(alternate, ranks, runs, warmup, timeout=900)
    rows = []
    for what, (lesson, _) in LESSONS.items():
        seconds = medians([rank[what] for rank in by_rank])
        rows.append(row(f"hybrid {what}", lesson, seconds["mesh"], seconds["lesson"], ranks))
    return rows


def main(args: side_by_side.Args) -> None:
    rows = rows_of(2, 5, 2) if args.quick else rows_of(2, 21, 3) + rows_of(4, 21, 3)
    side_by_side.show("hybrid", rows, args, "GPT of 6.4 M parameters")


if __name__ == "__main__":
    side_by_side.start(__file__, with_torch=False)
