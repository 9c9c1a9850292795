"""Compare our data parallel training with PyTorch's DDP: step times, and hidden communication.

    python benchmarks/data_parallel.py                       a table; --json for one JSON line
    python benchmarks/data_parallel.py --quick               fewer rows
    python benchmarks/data_parallel.py --plot buckets.png    step time against bucket size, and the prediction

Two ranks train a GPT of 12.9 million parameters. All variants share one process group and take turns, step
by step (benchmarks/side_by_side.py). Slow links are software links (comm/wire/slow_link.py), the same
for ours and DDP. On a slow link DDP sends through the hook of data_parallel/train_ddp.py; on loopback it is
unchanged.

`ddp` is DDP with its default buckets (first 1 MiB, then 25 MiB), and `ddp_same_cap` has our bucket size.
`ddp_powersgd` is DDP with PyTorch's `powerSGD_hook`, which sends through gloo itself: on loopback only.
In rows against `ideal` a clock replaces compute, and the ideal step is forward + backward of the last layer +
time on the wire.
"""

import dataclasses
import functools
import statistics
from pathlib import Path

import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import side_by_side
from benchmarks.side_by_side import GPT_13M, Batch, Rows, Seconds, Step, Training, medians, new_gpt, tokens
from comm import collectives, cost
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import BucketDataParallel
from data_parallel.train_ddp import HookState, through_comm
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab.cluster import Cluster
from lab.models.model import GPT
from lab.ranks import run_ranks
from lab.trace import timeline
from lab.trace.gantt import Event
from lab.trace.metronome import metronome_of
from lab.trace.overlap import overlap_of
from low_communication.train_compressed import CompressedDataParallel
from training.predict import observed_step, step_seconds
from zero import train_fsdp
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel

RANKS = 2
PLOT_LINK = "1gbit,2ms"
PLOT_CAPS = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]  # MiB
row = functools.partial(side_by_side.row, ranks=RANKS)


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare our data parallel training with PyTorch's DDP."""

    plot: Path | None = None
    """Draw step time against bucket size into this file (png or svg), and measure nothing else."""


def replicas(
    name: str,
    model: GPT,
    batch: Batch,
    bucket_mb: float | None = 4.0,
    optimizer_class: type[Optimizer] = AdamW,
    by_comm: bool = False,
) -> Training:
    """Return a training by a technique of lesson 2, by "powersgd", "ddp", "ddp_powersgd" or "fsdp2".

    `by_comm` makes torch's send through comm. Only there can they be slowed down; gloo moves the bytes.
    """
    device, lr = next(model.parameters()).device, 1e-3
    if name in ("zero1", "zero2"):
        sharded = ZeroOptimizer if name == "zero1" else ZeroGradientOptimizer
        options = {"bucket_mb": bucket_mb, "lr": lr}
        return Training(model, sharded(model.parameters(), optimizer_class, **options), batch)
    wrapped: nn.Module = model
    if name == "ddp":
        keep = device.type == "cuda"  # gradients in DDP's buckets, which saves a copy
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=keep)
        if by_comm:
            wrapped.register_comm_hook(HookState(), through_comm)
    elif name == "ddp_powersgd":
        # One bucket: of several, gloo can pair the second all-reduce of one with the first of another.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1024)
        columns, as_ours = 4, {"min_compression_rate": 1.0, "start_powerSGD_iter": 2}
        state = torchs.PowerSGDState(None, matrix_approximation_rank=columns, **as_ours)
        wrapped.register_comm_hook(state, torchs.powerSGD_hook)
    elif name == "fsdp2" and by_comm:
        wrapped = train_fsdp.shard(model, device)
    elif name == "fsdp2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    elif name == "bucket_overlap":
        wrapped = BucketDataParallel(model, bucket_mb=bucket_mb or 1.0)
    elif name == "powersgd":
        wrapped = CompressedDataParallel(model, "powersgd", bucket_mb=bucket_mb or 1.0)
    else:
        ours = {"naive": NaiveDataParallel, "overlap": OverlapDataParallel, "zero3": FullyShardedDataParallel}
        wrapped = ours[name](model)
    return Training(wrapped, optimizer_class(wrapped.parameters(), lr=lr), batch)


def training(name: str, by_comm: bool = False, windows: int = 2) -> Training:
    """Return a training of a technique with a bucket size in MiB, such as "bucket_overlap 4" or "ddp"."""
    technique, _, cap = name.partition(" ")
    batch, bucket_mb = tokens(GPT_13M, windows), float(cap) if cap else None
    return replicas(technique, new_gpt(GPT_13M), batch, bucket_mb, SGD, by_comm)


def alternate(cluster: Cluster, names: list[str], runs: dict[str, int]) -> list[Seconds]:
    """Return the seconds of each step of each variant on this rank, for each link and its number of runs."""
    variants = {name: training(name, by_comm="loopback" not in runs) for name in names}
    side_by_side.alternate(variants, 0)
    return [side_by_side.alternate(variants, some, link, warmup=0) for link, some in runs.items()]


def metronome(cluster: Cluster, link: str, tick: float, runs: int) -> tuple[list[float], float]:
    """Return the seconds of each step with a clock instead of compute, and the seconds of the ideal step."""
    module = metronome_of(GPT(GPT_13M), tick)
    model = BucketDataParallel(module)
    on_wire = sum(p.nbytes for p in model.trained)
    wire = 2 * (cluster.world_size - 1) / cluster.world_size * on_wire * slow_link.parse(link).beta
    step = Training(model, None, tokens(GPT_13M, 1))
    seconds = side_by_side.alternate({"step": step}, runs, link)["step"]
    return seconds, module.forward_seconds + module.last_layer_backward_seconds + wire


def spans_of(step: Step, link: str) -> list[Event]:
    """Return the spans of computing and communication of a step."""
    with slow_link.slowed(slow_link.parse(link)):
        collectives.barrier()
        timeline.start_recording()
        step()
        timeline.stop_recording()
    return timeline.recorded()


def hidden(cluster: Cluster, link: str, runs: int) -> tuple[float, float]:
    """Return the median seconds of communication, and of hidden communication."""
    step = training("bucket_overlap 4", windows=4)  # computing then takes longer than communication
    side_by_side.alternate({"warm-up": step}, 0)
    seen = [overlap_of(spans_of(step, link)) for _ in range(runs)]
    return (
        statistics.median(one.communication_seconds for one in seen),
        statistics.median(one.hidden_seconds for one in seen),
    )


def measure(quick: bool) -> Rows:
    names = ["bucket_overlap 4", "ddp", "ddp 4", "naive"]
    seconds = {}
    for runs in ({"loopback": 7}, {"1gbit": 7, "200mbit": 3}):
        runs = {link: 3 for link in runs if link != "200mbit"} if quick else runs
        by_rank = run_ranks(alternate, RANKS, names, runs, timeout=900)
        seconds |= {link: medians(ranks) for link, *ranks in zip(runs, *by_rank, strict=True)}
    against = {"ddp": "ddp", "ddp 4": "ddp_same_cap", "naive": "naive"}
    rows = [
        row("bucket_overlap", against[name], by["bucket_overlap 4"], by[name], link=link)
        for link, by in seconds.items()
        for name in against
    ]
    compressed = ["powersgd 4", "ddp_powersgd"]
    by = medians([ours for [ours] in run_ranks(alternate, RANKS, compressed, {"loopback": 7}, timeout=300)])
    rows.append(row("powersgd", "ddp_powersgd", by["powersgd 4"], by["ddp_powersgd"], link="loopback"))
    ticking = run_ranks(metronome, RANKS, "1gbit", 0.02, 3 if quick else 7, timeout=300)
    times, (_, ideal) = side_by_side.median_of_slowest([seconds for seconds, _ in ticking]), ticking[0]
    rows.append(row("bucket_overlap metronome 20ms", "ideal", times, ideal, link="1gbit"))
    shares = run_ranks(hidden, RANKS, "1gbit", 2 if quick else 5, timeout=300)
    communication, both = (statistics.mean(column) for column in zip(*shares, strict=True))
    rows.append(row("bucket_overlap hidden", "communication", both, communication, link="1gbit"))
    return rows


def against_bucket_size(cluster: Cluster, link: str) -> tuple[Seconds, dict[str, float]]:
    """Return the seconds of each step for each bucket size, and of the step that the formula predicts."""
    variants = {str(cap): training(f"bucket_overlap {cap}") for cap in PLOT_CAPS}
    seconds = side_by_side.alternate(variants, 5, link)
    slow, ranks = slow_link.parse(link), cluster.world_size
    wire = functools.partial(cost.seconds, "all_reduce", "ring", ranks=ranks, link=slow)
    predicted = {}
    for cap, step in variants.items():
        # The spans tell how much is computed until a bucket is ready, and how large it is.
        recorded = [spans_of(step, link) for _ in range(3)]
        predicted[cap] = statistics.median(step_seconds(*observed_step(events), wire) for events in recorded)
    return seconds, predicted


def plot(path: Path) -> None:
    """Draw step time against bucket size: small buckets cost latency, large ones delay the last bucket."""
    by_rank = run_ranks(against_bucket_size, RANKS, PLOT_LINK, timeout=900)
    measured = medians([seconds for seconds, _ in by_rank])
    predicted = [max(rank[cap] for _, rank in by_rank) for cap in measured]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(PLOT_CAPS, [seconds * 1e3 for seconds in measured.values()], "o", label="measured")
    axes.plot(PLOT_CAPS, [seconds * 1e3 for seconds in predicted], "k--", label="predicted (alpha-beta)")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bucket cap (MiB)", ylabel="step (ms, median)", ylim=(0, None))
    axes.set_xticks(PLOT_CAPS, [f"{cap:g}" for cap in PLOT_CAPS])
    axes.set_title(f"bucket overlap, GPT of 12.9 M parameters on {RANKS} ranks, --link {PLOT_LINK}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    if args.plot is not None:
        plot(args.plot)
        return
    side_by_side.show("data_parallel", measure(args.quick), args, "GPT of 12.9 M parameters")


if __name__ == "__main__":
    side_by_side.start(__file__)
