"""Compare our techniques with PyTorch's own on GPUs: the step time of each, with nccl.

    python benchmarks/gpus.py                            one GPU
    torchrun --nproc-per-node=8 benchmarks/gpus.py       eight GPUs
    python benchmarks/gpus.py --syncs bucket_overlap     where the host waits for the GPU in a step

Each rank trains the same GPT with AdamW on `--windows` windows of text. All variants share one process group
and take turns, step by step (benchmarks/side_by_side.py). With one GPU no byte travels: the ratio then shows
what a technique costs besides its communication.
"""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.side_by_side import alternate, leave_gloo_as_it_is, medians, row, show
from comm.script import start
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

BUCKET_MB = 25.0  # DDP's default
OURS = {
    "naive": "ddp",
    "overlap": "ddp",
    "bucket_overlap": "ddp",
    "zero1": "ddp",
    "zero2": "fsdp2",
    "zero3": "fsdp2",
}
"""What each of our techniques is compared with."""


@dataclasses.dataclass
class Args:
    """Compare our techniques with PyTorch's own on GPUs."""

    windows: int = 64
    """Number of windows of text in a rank's step."""
    runs: int = 30
    """Number of timed steps of each variant."""
    syncs: str | None = None
    """Name of a variant, of which a step is run that prints each line at which the host waits for the GPU."""
    json: bool = False
    """Print one JSON line instead of the table."""


def build(name: str, cluster: Cluster, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Return a step of a variant: one of OURS, "ddp" or "fsdp2"."""
    module = GPT(GPTConfig.named("13m")).to(cluster.device)
    model: nn.Module = module
    if name == "ddp":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    elif name == "fsdp2":
        mesh = init_device_mesh(cluster.device.type, (cluster.world_size,))
        for part in (*module.blocks, module):
            fully_shard(part, mesh=mesh)
    elif name == "bucket_overlap":
        model = BucketDataParallel(module, bucket_mb=BUCKET_MB)
    elif not name.startswith("zero") or name == "zero3":
        wrappers = {"naive": NaiveDataParallel, "overlap": OverlapDataParallel}
        model = wrappers.get(name, FullyShardedDataParallel)(module)
    if name in ("zero1", "zero2"):
        sharded = ZeroOptimizer if name == "zero1" else ZeroGradientOptimizer
        optimizer = sharded(module.parameters(), torch.optim.AdamW, bucket_mb=BUCKET_MB, lr=1e-3)
        finish = optimizer.finish_gradient_sync
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        finish = getattr(model, "finish_gradient_sync", lambda: None)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        finish()
        optimizer.step()

    return step


def timed_on_gpu(step: Callable[[], None]) -> Callable[[], None]:
    """Return the step followed by a wait for the GPU, which the time must include."""

    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def show_syncs(step: Callable[[], None]) -> None:
    """Run a step, and print each line at which the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found, contextlib.suppress(KeyboardInterrupt):
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    for one in found:
        print(f"{one.filename}:{one.lineno}: {str(one.message).splitlines()[0]}")
    print(f"the host waited {len(found)} times")


def main(cluster: Cluster, args: Args) -> None:
    if cluster.device.type != "cuda" or dist.get_backend() != "nccl":
        raise WorkbookError("This benchmark needs GPUs, and nccl as the backend.")
    if args.syncs not in (None, *OURS, "ddp", "fsdp2"):
        raise WorkbookError(f"--syncs {args.syncs}: it must be one of {', '.join((*OURS, 'ddp', 'fsdp2'))}.")
    config = GPTConfig.named("13m")
    tokens = torch.randint(256, (args.windows, config.block_size + 1), device=cluster.device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if args.syncs is not None:
        step = build(args.syncs, cluster, batch)
        for _ in range(3):
            step()
        show_syncs(step)
        return
    steps = {name: timed_on_gpu(build(name, cluster, batch)) for name in (*OURS, "ddp", "fsdp2")}
    by_rank: list = [None] * cluster.world_size
    dist.all_gather_object(by_rank, alternate(steps, args.runs, warmup=5))
    if cluster.is_main:
        median = medians(by_rank)
        size = cluster.world_size
        rows = [
            row(ours, theirs, "nccl", median[ours], median[theirs], world_size=size)
            for ours, theirs in OURS.items()
        ]
        show("gpus", rows, args.json, f"{size} GPU{'s' * (size > 1)}: {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    leave_gloo_as_it_is()
    start(main, Args)
