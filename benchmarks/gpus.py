"""Compare our techniques with PyTorch's own on GPUs: the step time of each, with nccl.

    python benchmarks/gpus.py                            one GPU
    torchrun --nproc-per-node=8 benchmarks/gpus.py       eight GPUs

Each rank trains the same GPT with AdamW on `--windows` windows of text. All variants share one process group
and take turns, step by step (benchmarks/side_by_side.py). With one GPU no byte travels: the ratio then shows
what a technique costs besides its communication.
"""

import dataclasses

import torch
import torch.distributed as dist

from benchmarks import side_by_side
from benchmarks.data_parallel import replicas
from benchmarks.side_by_side import GPT_13M, Step, alternate, medians, row, show, tokens
from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT

BUCKET_MB = 25.0  # DDP's default
# What each of our techniques is compared with.
OURS = dict.fromkeys(("naive", "overlap", "bucket_overlap", "zero1"), "ddp")
OURS |= dict.fromkeys(("zero2", "zero3"), "fsdp2")


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare our techniques with PyTorch's own on GPUs."""

    windows: int = 64
    """Number of windows of text in a rank's step."""
    runs: int = 30
    """Number of timed steps of each variant; with --quick there are 5."""
    bf16: bool = False
    """Train in bfloat16 (16 bits). In float32 computing takes so long that it hides all communication."""


def build(name: str, cluster: Cluster, args: Args) -> Step:
    """Return a step of a variant: one of OURS, "ddp" or "fsdp2"."""
    x, y = (part.to(cluster.device) for part in tokens(GPT_13M, args.windows))
    model = GPT(GPT_13M).to(cluster.device, torch.bfloat16 if args.bf16 else torch.float32)
    return replicas(name, model, (x, y), bucket_mb=BUCKET_MB)


def timed_on_gpu(step: Step) -> Step:
    """Return the step followed by a wait for the GPU, which the time must include."""

    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def main(cluster: Cluster, args: Args) -> None:
    if cluster.device.type != "cuda" or dist.get_backend() != "nccl":
        raise WorkbookError("This benchmark needs GPUs, and nccl as the backend.")
    names = (*OURS, "ddp", "fsdp2")
    steps = {name: timed_on_gpu(build(name, cluster, args)) for name in names}
    by_rank: list = [None] * cluster.world_size
    dist.all_gather_object(by_rank, alternate(steps, 5 if args.quick else args.runs, warmup=5))
    if cluster.is_main:
        by = medians(by_rank)
        rows = [row(ours, other, by[ours], by[other], len(by_rank), "nccl") for ours, other in OURS.items()]
        show("gpus", rows, args, torch.cuda.get_device_name())


if __name__ == "__main__":
    start(main, Args)
