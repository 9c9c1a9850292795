"""Data parallel, ours against PyTorch's DDP: step times on loopback and slow links, memory, what is hidden.

    python benchmarks/data_parallel.py                          a table; --json for one JSON line python
    benchmarks/data_parallel.py --quick                  fewer rows python benchmarks/data_parallel.py
    --plot buckets.png       only step time against bucket size, with the prediction

Two ranks train a GPT of 12.9 million parameters. All variants live in one process group and take turns,
step by step, so that whatever else the machine does hits them all. A step takes as long as its slowest
rank; ratios are those of medians, below 1 where ours is better. Links are software links
(comm.slow_link), the same for both; DDP sends through the hook of data_parallel/train_ddp.py there, and
untouched on loopback.

`ddp` is DDP with its defaults (1 MiB first, then 25), `ddp_same_cap` has our cap; `flat` is one
all-reduce of everything after the backward. Where `against` says `ideal`, compute is replaced by a clock,
and the ideal is forward + backward of the last layer + wire time.
"""

import ctypes
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where this file would stand for the package of its name

import torch
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm import collectives, cost, slow_link
from data_parallel.predict import step_seconds
from data_parallel.train_bucket_overlap import MIB, BucketDataParallel, fill
from data_parallel.train_ddp import HookState, through_comm
from data_parallel.train_naive import NaiveDataParallel
from data_parallel.train_overlap import OverlapDataParallel
from lab import meter, timeline
from lab.cluster import Cluster
from lab.metronome import metronome_of
from lab.model import GPT, GPTConfig, loss_of
from lab.overlap import overlap_of
from lab.ranks import preload, run_ranks

RANKS = 2
CONFIG = GPTConfig.named("13m")
CAP_MB = 4.0
WINDOWS = 2  # of text, for each rank and step
PLOT_CAPS = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]  # MiB
Step = Callable[[], None]


@dataclasses.dataclass
class Args:
    """Ours against DDP."""

    quick: bool = False
    """Fewer rows and runs."""
    plot: Path | None = None
    """Only measure step time against bucket size, and draw it (png or svg)."""
    plot_link: str = "1gbit,2ms"
    """The link of that picture."""
    json: bool = False
    """One JSON line instead of a table."""


def text(windows: int = WINDOWS) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (windows, CONFIG.block_size + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def build(name: str, hooked: bool, module: nn.Module, windows: int = WINDOWS) -> Step:
    """One training step of the variant: "naive", "flat", "overlap", "bucket_overlap 4", "ddp", "ddp 4"."""
    kind, _, cap = name.partition(" ")
    model: nn.Module
    if kind == "ddp":
        model = DistributedDataParallel(module, bucket_cap_mb=float(cap) if cap else None)
        if hooked:
            model.register_comm_hook(HookState(), through_comm)
    elif kind == "ddpview":
        model = DistributedDataParallel(module, bucket_cap_mb=float(cap), gradient_as_bucket_view=True)
    elif kind == "bucket_overlap":
        model = BucketDataParallel(module, pattern="tcp", bucket_mb=float(cap))
    else:
        wrappers = {"naive": NaiveDataParallel, "overlap": OverlapDataParallel}
        flat = functools.partial(BucketDataParallel, bucket_mb=sys.maxsize / MIB, first_mb=sys.maxsize / MIB)
        model = wrappers.get(kind, flat)(module, pattern="tcp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text(windows)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if not kind.startswith("ddp"):
            model.finish_gradient_sync()
        optimizer.step()

    return step


def alternate(cluster: Cluster, link: str, names: list[str], runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each variant on this rank, the first two of each left out."""
    slow = None if link == "loopback" else slow_link.parse(link)
    steps = {name: build(name, slow is not None, GPT(CONFIG)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in range(2 + runs):
        for i in range(len(names)):
            # Another one begins each time: what runs before a step leaves the caches to it.
            name = names[(i + run) % len(names)]
            # DDP and ours remake their buckets in the first steps: no need to do that slowly.
            with slow_link.slowed(slow if run >= 2 else None):
                seconds[name].append(timed(steps[name]))
    return {name: times[2:] for name, times in seconds.items()}


def timed(step: Step) -> float:
    collectives.barrier(pattern="torch")
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def medians(by_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """The median over runs of each variant's slowest rank."""
    return {
        name: statistics.median(map(max, zip(*(rank[name] for rank in by_rank), strict=True)))
        for name in by_rank[0]
    }


def metronome(cluster: Cluster, link: str, tick: float, runs: int) -> tuple[list[float], float]:
    """Seconds of each step with compute replaced by a clock, and the ideal."""
    module = metronome_of(GPT(CONFIG), tick)
    model = BucketDataParallel(module, pattern="tcp", bucket_mb=1.0)
    x, y = text(1)
    on_wire = sum(p.nbytes for p in model.trained)
    slow = slow_link.parse(link)
    wire = 2 * (cluster.world_size - 1) / cluster.world_size * on_wire * slow.beta

    def step() -> None:
        for parameter in model.trained:
            parameter.grad = None
        loss_of(model(x), y).backward()
        model.finish_gradient_sync()

    seconds = []
    for run in range(2 + runs):
        with slow_link.slowed(slow if run >= 2 else None):
            seconds.append(timed(step))
    return seconds[2:], module.forward_seconds + module.last_layer_backward_seconds + wire


def hidden(cluster: Cluster, link: str, windows: int, runs: int) -> tuple[float, float, float]:
    """Compute, communication and hidden seconds of a step, medians, where compute is the longer one."""
    module = GPT(CONFIG)
    model = BucketDataParallel(module, pattern="tcp", bucket_mb=CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text(windows)
    seen = []
    for run in range(2 + runs):
        with slow_link.slowed(slow_link.parse(link) if run >= 2 else None):
            collectives.barrier()
            timeline.start_recording()
            optimizer.zero_grad()
            with timeline.span("forward", "forward"):
                loss = loss_of(model(x), y)
            with timeline.span("backward", "backward"):
                loss.backward()
            model.finish_gradient_sync()
            with timeline.span("step", "optimizer"):
                optimizer.step()
            timeline.stop_recording()
        seen.append(overlap_of(timeline.recorded()))
    columns = ("compute_seconds", "communication_seconds", "hidden_seconds")
    compute, communication, both = (
        statistics.median(getattr(one, column) for one in seen[2:]) for column in columns
    )
    return compute, communication, both


def peak(cluster: Cluster, kind: str) -> int:
    """Peak memory of this process in a few steps of "bucket_overlap" or of "ddp" with gradients as views."""
    # glibc keeps what is freed unless it is mapped on its own, and would hide what a step really needs.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    module = GPT(CONFIG)
    model: nn.Module
    if kind == "ddp":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        model = BucketDataParallel(module, pattern="tcp", bucket_mb=CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = text(1)
    for step in range(4):
        if step == 2:
            meter.reset_peak_memory(cluster.device)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if not kind.startswith("ddp"):
            model.finish_gradient_sync()
        optimizer.step()
    return meter.peak_memory(cluster.device)


def ready_times(cluster: Cluster, runs: int = 3) -> tuple[float, float, list[tuple[float, int]]]:
    """A step of this rank without communication: seconds of forward and backward, of the optimizer, and
    when each parameter's gradient is ready (seconds since the start, the parameter's position)."""
    module = GPT(CONFIG)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    x, y = text()
    moments: list[tuple[int, float]] = []
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: moments.append((i, time.perf_counter())))
    seen = []
    for _ in range(2 + runs):
        collectives.barrier()
        moments.clear()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        computed = time.perf_counter()
        optimizer.step()
        ready = [(moment - start, i) for i, moment in moments]
        seen.append((computed - start, time.perf_counter() - computed, ready))
    _, _, ready = sorted(seen[2:])[runs // 2]
    compute, update = (statistics.median(column) for column in list(zip(*seen[2:], strict=True))[:2])
    return compute, update, ready


def against_bucket_size(args: Args) -> dict[float, tuple[float, float]]:
    """Measured and predicted seconds of a step for every cap in PLOT_CAPS."""
    names = [f"bucket_overlap {cap}" for cap in PLOT_CAPS]
    measured = medians(run_ranks(alternate, RANKS, args.plot_link, names, 5, timeout=900))
    by_rank = run_ranks(ready_times, RANKS, timeout=300)
    compute, update, ready = max(by_rank, key=lambda rank: rank[0])
    link, parameters = slow_link.parse(args.plot_link), list(GPT(CONFIG).parameters())
    ordered = [parameters[i] for _, i in ready]
    result = {}
    for cap, name in zip(PLOT_CAPS, names, strict=True):
        filled = fill(ordered, int(min(0.25, cap) * MIB), int(cap * MIB))
        messages = [
            (max(ready[at][0] for at in bucket), sum(ordered[at].nbytes for at in bucket))
            for bucket in filled
        ]
        wire = functools.partial(cost.seconds, "all_reduce", "tcp", ranks=RANKS, link=link)
        result[cap] = (
            measured[name],
            step_seconds(compute, update, messages, lambda size: wire(num_bytes=size)),
        )
    return result


def plot(result: dict[float, tuple[float, float]], link: str, path: Path) -> None:
    """Step time against bucket size: at the left latencies count, at the right the last bucket."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    measured, predicted = zip(*result.values(), strict=True)
    axes.plot(list(result), [seconds * 1e3 for seconds in measured], "o", label="measured")
    axes.plot(list(result), [seconds * 1e3 for seconds in predicted], "k--", label="predicted (alpha-beta)")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="bucket cap (MiB)", ylabel="step (ms, median)", ylim=(0, None))
    axes.set_xticks(PLOT_CAPS, [f"{cap:g}" for cap in PLOT_CAPS])
    axes.set_title(f"bucket overlap, GPT of 12.9 M parameters on {RANKS} ranks, --link {link}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def row(what: str, against: str, link: str, ours: float, theirs: float, unit: str = "s") -> dict:
    place = {"what": what, "against": against, "link": link, "world_size": RANKS}
    return place | {"ours": ours, "theirs": theirs, "unit": unit, "ratio": ours / theirs}


def measure(quick: bool) -> list[dict]:
    rows: list[dict] = []
    caps = ["4"] if quick else ["1", "4", "25"]
    for link, runs in (("loopback", 7), ("1gbit", 7), ("200mbit", 3)):
        names = ["ddp", *(f"bucket_overlap {cap}" for cap in caps), *(f"ddp {cap}" for cap in caps)]
        names += ["naive"] if quick else ["naive", "flat", "overlap"]
        if quick and link == "200mbit":
            names, runs = ["bucket_overlap 4", "ddp 4"], 2
        seconds = medians(run_ranks(alternate, RANKS, link, names, runs // (1 + quick), timeout=900))
        for name in names:
            kind, _, cap = name.partition(" ")
            if kind == "ddp":
                continue
            what = f"bucket_overlap {cap}MiB" if cap and cap != "4" else kind
            if "ddp" in seconds:
                rows.append(row(what, "ddp", link, seconds[name], seconds["ddp"]))
            if cap:
                rows.append(row(what, "ddp_same_cap", link, seconds[name], seconds[f"ddp {cap}"]))
                if "naive" in seconds:
                    rows.append(row(what, "naive", link, seconds[name], seconds["naive"]))
    by_rank = run_ranks(metronome, RANKS, "1gbit", 0.02, 3 if quick else 7, timeout=300)
    times = statistics.median(map(max, zip(*(seconds for seconds, _ in by_rank), strict=True)))
    rows.append(row("bucket_overlap metronome 20ms", "ideal", "1gbit", times, by_rank[0][1]))
    shares = run_ranks(hidden, RANKS, "1gbit", 4, 2 if quick else 5, timeout=300)
    compute, communication, both = (statistics.mean(column) for column in zip(*shares, strict=True))
    rows.append(row("bucket_overlap hidden", "communication", "1gbit", both, communication))
    rows.append(row("bucket_overlap hidden, its compute", "communication", "1gbit", compute, communication))
    repeats = 1 if quick else 3
    peaks = {
        kind: statistics.median(max(run_ranks(peak, RANKS, kind, timeout=300)) for _ in range(repeats))
        for kind in ("bucket_overlap", "ddp")
    }
    rows.append(
        row("bucket_overlap peak memory", "ddp_bucket_view", "loopback", *peaks.values(), unit="bytes")
    )
    return rows


def main(args: Args) -> None:
    # Forked ranks have everything imported.
    preload("benchmarks.data_parallel")
    if args.plot is not None:
        plot(against_bucket_size(args), args.plot_link, args.plot)
        return
    rows = measure(args.quick)
    if args.json:
        print(json.dumps({"benchmark": "data_parallel", "rows": rows}))
        return
    table = Table("what", "against", "link", title=f"{RANKS} ranks, GPT of 12.9 M parameters")
    for column in ("ours", "theirs", "ratio"):
        table.add_column(column, justify="right")
    for one in rows:
        scale, unit = (1e3, "ms") if one["unit"] == "s" else (1 / MIB, "MiB")
        sides = (f"{one[side] * scale:.1f} {unit}" for side in ("ours", "theirs"))
        table.add_row(one["what"], one["against"], one["link"], *sides, f"{one['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
