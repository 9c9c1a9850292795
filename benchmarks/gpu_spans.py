"""Check on GPUs that the timeline shows what torch.profiler sees, and count what makes the host wait.

    torchrun --nproc-per-node=2 benchmarks/gpu_spans.py

A step of BucketDataParallel is timed twice, in the same run: by the spans of our timeline, whose ends are
marks in a stream, and by torch.profiler, which asks the GPU about each kernel. The time of nccl's kernels
must agree within 20%. `torch.cuda.set_sync_debug_mode` then warns of each call for which the host waits;
between the forward and the optimizer's step there must be none.
"""

import dataclasses
import warnings

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import side_by_side
from benchmarks.side_by_side import GPT_13M, tokens
from comm.script import start
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, loss_of
from lab.trace import timeline

WARMUP, STEPS = 3, 5


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Check the timeline's spans on GPUs against torch.profiler."""

    windows: int = 64
    """Number of windows of text in a rank's step."""


def main(cluster: Cluster, args: Args) -> None:
    if cluster.device.type != "cuda" or dist.get_backend() != "nccl" or cluster.world_size < 2:
        raise WorkbookError("This check needs two ranks on GPUs, and nccl as the backend.")
    x, y = (part.to(cluster.device) for part in tokens(GPT_13M, args.windows))
    model = BucketDataParallel(GPT(GPT_13M).to(cluster.device))

    def step() -> None:
        model.zero_grad()
        loss_of(model(x), y).backward()
        model.finish_gradient_sync()

    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    timeline.start_recording(cluster.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    spans = sum(event.duration_ns for event in timeline.recorded() if event.kind == "communication") / 1e6
    timeline.stop_recording()
    kernels = sum(row.self_device_time_total for row in profiler.key_averages() if row.key.startswith("nccl"))
    waits = waits_of(step)
    if cluster.is_main:
        print(f"communication: spans {spans / STEPS:.2f} ms a step, kernels {kernels / 1e3 / STEPS:.2f} ms")
        print(f"the host waits {len(waits)} times in a step {' '.join(waits)}")
    if waits or not 0.8 <= spans / max(kernels / 1e3, 1e-9) <= 1.2:
        raise WorkbookError("The spans and the kernels differ, or the host waits: see the two lines above.")


def waits_of(step: side_by_side.Step) -> list[str]:
    """Return the warnings of torch about calls in a step that made the host wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    return [
        f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)
    ]


if __name__ == "__main__":
    start(main, Args)
