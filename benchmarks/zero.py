"""Compare ZeRO 1, 2 and 3 and HSDP with FSDP2 and with plain data parallelism: step times and memory.

    python benchmarks/zero.py                  tables; --json for one JSON line
    python benchmarks/zero.py --quick          4 ranks only, fewer runs
    python benchmarks/zero.py --plot FOLDER    memory.png and step_time.png for 1 to 4 ranks

Every rank trains a GPT of 12.9 million parameters with AdamW on one window of text. All variants share one
process group and take turns, step by step (benchmarks/side_by_side.py). The slow link is a software link
(comm/wire/slow_link.py), the same for all variants. On loopback `fsdp2` is unchanged FSDP2. On the slow
link FSDP2 sends through comm (zero/train_fsdp.py), because only comm can be slowed down; gloo still
moves the bytes. `hsdp` and FSDP2 on a mesh of two dimensions run on loopback, as two machines of two ranks.

`peak memory` is the peak of the process. Most of it is Python and torch, so `above start` is the memory that
training added.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from benchmarks import side_by_side
from benchmarks.data_parallel import replicas
from benchmarks.side_by_side import GPT_13M, Rows, Seconds, Training, medians, new_gpt, tokens
from comm.collectives import use_pattern
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.memory import MemoryReport
from low_communication.train_hsdp import HybridShardedDataParallel, machine_groups
from zero.memory import FORMULAS, Held, formula

LINKS = ("loopback", "1gbit")
STAGES = {"naive": 0, "zero1": 1, "zero2": 2, "zero3": 3}
PAIRS = [("zero3", "fsdp2"), ("zero1", "bucket_overlap"), ("zero2", "bucket_overlap"), ("zero3", "naive")]
SIZES = (1, 2, 3, 4)  # world sizes in the pictures


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare ZeRO 1, 2 and 3 and HSDP with FSDP2 and with data parallelism."""

    plot: Path | None = None
    """Draw memory.png and step_time.png into this folder, and measure nothing else."""


def training(name: str, by_comm: bool = False) -> Training:
    use_pattern("pipelined_ring")
    return replicas(name, new_gpt(GPT_13M), tokens(GPT_13M, 1), by_comm=by_comm)


def alternate(cluster: Cluster, names: list[str], runs: int) -> list[Seconds]:
    """Return each step's seconds on this rank, by variant and for each link."""
    variants = {name: training(name) for name in names}
    seconds = [side_by_side.alternate(variants, runs, warmup=1)]
    if "fsdp2" in names:
        variants["fsdp2"] = training("fsdp2", by_comm=True)
        variants["fsdp2"]()
    return [*seconds, side_by_side.alternate(variants, runs, LINKS[1], warmup=0)]


def alternate_hybrids(cluster: Cluster, runs: int) -> Seconds:
    """Return each step's seconds on this rank, of ours and of FSDP2, where half the ranks are a machine."""
    half = cluster.world_size // 2
    shards, same_shard = machine_groups(cluster, half)
    for group in (shards, same_shard):
        use_pattern("pipelined_ring", group)
    ours = HybridShardedDataParallel(new_gpt(GPT_13M), shards, same_shard)
    theirs = new_gpt(GPT_13M)
    mesh = init_device_mesh(cluster.device.type, (2, half), mesh_dim_names=("replicate", "shard"))
    for part in (*theirs.blocks, theirs):
        fully_shard(part, mesh=mesh)
    variants = {
        name: Training(model, AdamW(model.parameters(), lr=1e-3, fused=True), tokens(GPT_13M, 1))
        for name, model in (("hsdp", ours), ("fsdp2", theirs))
    }
    return side_by_side.alternate(variants, runs, warmup=1)


def peak(cluster: Cluster, name: str) -> tuple[int, int]:
    """Return the peak memory of this process in a step, and its memory before the model was made."""
    return side_by_side.peak_of_a_step(cluster, lambda: training(name))


def held(cluster: Cluster) -> dict[str, float]:
    """Return the bytes of parameters, gradients and optimizer state after a step of each stage."""
    result = {}
    for name in STAGES:
        one = training(name)
        one()
        measured = MemoryReport(one.model, one.optimizer).measure()
        result[name] = sum(measured[kind] for kind in ("parameters", "gradients", "optimizer_state"))
    return result


def by_formula(stage: int, ranks: Any) -> float:
    """Return what a rank holds; AdamW's state is two numbers for each parameter."""
    full = sum(parameter.nbytes for parameter in new_gpt(GPT_13M).parameters())
    return sum(dataclasses.astuple(formula(stage, Held(full, full, 2 * full), ranks)))


def time_rows(ranks: int, names: list[str], runs: int) -> Rows:
    """Return rows for the step times on each link."""
    by_rank = run_ranks(alternate, ranks, names, runs, timeout=900)
    rows: Rows = []
    for link, *times in zip(LINKS, *by_rank, strict=True):
        seconds = medians(times)
        pairs = [(a, b) for a, b in PAIRS if b in seconds]
        rows += [side_by_side.row(a, b, seconds[a], seconds[b], ranks, link) for a, b in pairs]
    return rows


def hybrid_row(ranks: int, runs: int) -> dict[str, Any]:
    """Return the row of HSDP."""
    seconds = medians(run_ranks(alternate_hybrids, ranks, runs, timeout=300))
    return side_by_side.row("hsdp", "fsdp2", seconds["hsdp"], seconds["fsdp2"], ranks)


def memory_rows(ranks: int) -> Rows:
    """Return rows for the peak memory of zero3 and FSDP2."""
    ours, theirs = (run_ranks(peak, ranks, name, timeout=300) for name in ("zero3", "fsdp2"))
    tops = [max(top for top, _ in by_rank) for by_rank in (ours, theirs)]
    added = [max(top - before for top, before in by_rank) for by_rank in (ours, theirs)]
    return [
        side_by_side.row("zero3 peak memory", "fsdp2", *tops, ranks, unit="bytes"),
        side_by_side.row("zero3 peak memory above start", "fsdp2", *added, ranks, unit="bytes"),
    ]


def plot_memory(path: Path) -> None:
    """Draw the bytes that a rank holds after a step as points, and the formula as lines."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    by_size = [run_ranks(held, ranks, timeout=300) for ranks in SIZES]
    smooth = [1 + i / 20 for i in range(20 * (SIZES[-1] - 1) + 1)]  # also between integers
    for name, stage in STAGES.items():
        most = [max(rank[name] for rank in by_rank) / 1e6 for by_rank in by_size]
        [points] = axes.plot(SIZES, most, "o", label=f"{name}, measured")
        line = [by_formula(stage, ranks) / 1e6 for ranks in smooth]
        axes.plot(smooth, line, color=points.get_color(), label=FORMULAS[stage], linewidth=1)
    axes.set(xlabel="world size n", ylabel="tensors of a rank (MB)", ylim=(0, None))
    axes.set_xticks(SIZES)
    axes.set_title("parameters P, gradients G, AdamW's state O after a step; GPT of 12.9 M parameters")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", ncols=2)
    figure.savefig(path, dpi=110)


def plot_step_time(path: Path) -> None:
    """Draw a bar for each stage and world size. More ranks compute more on the same cores."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, len(LINKS), sharey=True)
    by_size = [run_ranks(alternate, ranks, list(STAGES), 5, timeout=900) for ranks in SIZES]
    for i, (link, axes) in enumerate(zip(LINKS, panels, strict=True)):
        seconds = [medians([times[i] for times in by_rank]) for by_rank in by_size]
        for name, stage in STAGES.items():
            places = [ranks + 0.2 * (stage - 1.5) for ranks in SIZES]
            axes.bar(places, [one[name] * 1e3 for one in seconds], width=0.18, label=name)
        axes.set(xlabel="world size", title=link if link == "loopback" else f"--link {link}")
        axes.set_xticks(SIZES)
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("step (ms, median)")
    panels[0].legend(loc="upper left")
    figure.suptitle(
        f"step time, GPT of 12.9 M parameters, a window of text for each rank, {os.cpu_count()} cores"
    )
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    if args.plot is not None:
        args.plot.mkdir(parents=True, exist_ok=True)
        plot_memory(args.plot / "memory.png")
        plot_step_time(args.plot / "step_time.png")
        return
    names = ["bucket_overlap", "zero1", "zero2", "zero3", "fsdp2"]
    if args.quick:
        rows = [*time_rows(4, names, 2), hybrid_row(4, 2), *memory_rows(4)]
    else:
        rows = [one for n in (2, 4) for one in time_rows(n, ["naive", *names], 5) + memory_rows(n)]
        rows.append(hybrid_row(4, 5))
    side_by_side.show("zero", rows, args, "GPT of 12.9 M parameters, AdamW")


if __name__ == "__main__":
    side_by_side.start(__file__)
