"""Compare our stages of ZeRO with FSDP2 and with data parallelism: step times, memory, bytes sent.

    python benchmarks/zero.py                  a table; --json for one JSON line
    python benchmarks/zero.py --quick          4 ranks only, and fewer rows
    python benchmarks/zero.py --plot FOLDER    draws memory and step time for each stage and world size

2 and 4 ranks train a GPT of 12.9 million parameters with AdamW. All variants share one process group and take
turns, step by step (benchmarks/side_by_side.py). The slow link is a software link
(comm/wire/slow_link.py), the same for all variants. On loopback `fsdp2` is unchanged FSDP2. On the slow
link FSDP2 sends through comm (zero/train_fsdp.py), because only comm can be slowed down; gloo still
moves the bytes.

`peak memory` is the peak of the process. Most of it is Python and torch, so `above start` is the memory that
training added.
`lasting at the peak` is the largest sum, at any time in a step, of shards, optimizer state and gathered
parameters. It is compared with ZeRO's formula (P+G+O)/n plus two blocks: one computes while the next one is
gathered.
`everything at the peak` includes the tensors that are being sent. It is compared with the same plus three
more blocks: the gradients of two blocks are reduced while those of a third are computed. Not in the formula
are the root, the shards that arrive, and scratch memory.
`bytes sent` is compared with 2 or 3 times P (n-1)/n. FSDP2's bytes are counted as the best-known algorithm
would send them; gloo's reduce-scatter sends twice as many.
"""

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro
from matplotlib.figure import Figure

from benchmarks import side_by_side
from benchmarks.side_by_side import medians
from benchmarks.zero_steps import CONFIG, STAGES, alternate, held, peak, zero3_at_its_peak
from lab.models.model import GPT
from lab.ranks import run_ranks
from lab.ranks.forked import preload
from zero.memory import FORMULAS, Held, formula

LINKS = ("loopback", "1gbit")
PASSES = {"naive": 2, "bucket_overlap": 2, "zero1": 2, "zero2": 2, "zero3": 3, "fsdp2": 3}  # times P (n-1)/n
SIZES = (1, 2, 3, 4)  # world sizes in the pictures
Rows = list[dict[str, Any]]


@dataclasses.dataclass
class Args:
    """Compare ZeRO 1, 2 and 3 with FSDP2 and with data parallelism."""

    quick: bool = False
    """Measure 4 ranks only, with fewer rows and runs."""
    plot: Path | None = None
    """Draw memory.png and step_time.png into this folder, and measure nothing else."""
    json: bool = False
    """Print one JSON line instead of tables."""


def parameter_bytes() -> tuple[int, int]:
    """Return the bytes of the parameters of the full model, and of one block."""
    module = GPT(CONFIG)
    full, block = (sum(p.nbytes for p in part.parameters()) for part in (module, module.blocks[0]))
    return full, block


def held_by_one_process() -> Held:
    """Return what one process holds; AdamW's state is two numbers for each parameter."""
    full, _ = parameter_bytes()
    return Held(full, full, 2 * full)


def time_rows(ranks: int, names: list[str], runs: int, warmup: int = 2) -> Rows:
    """Return rows for the step times on each link, and for the bytes sent."""
    row = functools.partial(side_by_side.row, world_size=ranks)
    by_rank = run_ranks(alternate, ranks, [(link, names, runs) for link in LINKS], warmup, timeout=900)
    rows: Rows = []
    for i, link in enumerate(LINKS):
        seconds = medians([times[i] for times, _ in by_rank])
        pairs = [("zero3", "fsdp2"), ("zero1", "bucket_overlap"), ("zero2", "bucket_overlap")]
        pairs += [(what, "naive") for what in ("zero1", "zero2", "zero3", "fsdp2")]
        rows += [row(a, b, link, seconds[a], seconds[b]) for a, b in pairs if b in seconds]
    full, _ = parameter_bytes()
    for name in names:
        # FSDP2's bytes are counted only on the slow link, where they go through comm.
        sent, link = max(sent[-1][name] for _, sent in by_rank), LINKS[-1]
        should = PASSES[name] * full * (ranks - 1) / ranks
        rows.append(row(f"{name} bytes sent", "formula", link, sent, should, unit="bytes"))
    return rows


def memory_rows(ranks: int) -> Rows:
    """Return rows for the peak memory of zero3 and FSDP2, and for zero3's tensors against the formula."""
    row = functools.partial(side_by_side.row, link="loopback", world_size=ranks, unit="bytes")
    peaks, added = {}, {}
    for name in ("zero3", "fsdp2"):
        by_rank = run_ranks(peak, ranks, name, timeout=300)
        peaks[name] = max(top for top, _ in by_rank)
        added[name] = max(top - before for top, before in by_rank)
    rows = [
        row("zero3 peak memory", "fsdp2", ours=peaks["zero3"], theirs=peaks["fsdp2"]),
        row("zero3 peak memory above start", "fsdp2", ours=added["zero3"], theirs=added["fsdp2"]),
    ]
    held_most = run_ranks(zero3_at_its_peak, ranks, timeout=300)
    lasting, everything = (max(column) for column in zip(*held_most, strict=True))
    _, block = parameter_bytes()
    share = sum(dataclasses.astuple(formula(3, held_by_one_process(), ranks)))
    for what, ours, blocks in (("lasting", lasting, 2), ("everything", everything, 5)):
        against = f"formula + {blocks} blocks"
        rows.append(row(f"zero3 {what} at the peak", against, ours=ours, theirs=share + blocks * block))
    return rows


def measure(quick: bool) -> Rows:
    names = ["bucket_overlap", "zero1", "zero2", "zero3", "fsdp2"]
    if quick:
        return time_rows(4, names, runs=2, warmup=1) + memory_rows(4)
    rows: Rows = []
    for ranks in (2, 4):
        rows += time_rows(ranks, ["naive", *names], runs=5) + memory_rows(ranks)
    return rows


def plot_memory(path: Path) -> None:
    """Draw the bytes that a rank holds after a step as points, and the formula as lines."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    by_size = {ranks: run_ranks(held, ranks, list(STAGES), timeout=300) for ranks in SIZES}
    one_process = held_by_one_process()
    smooth: list[Any] = [1 + i / 20 for i in range(20 * (SIZES[-1] - 1) + 1)]  # also between integers
    for name, stage in STAGES.items():
        most = [max(sum(dataclasses.astuple(rank[name])) for rank in by_size[ranks]) for ranks in SIZES]
        [points] = axes.plot(SIZES, [size / 1e6 for size in most], "o", label=f"{name}, measured")
        line = [sum(dataclasses.astuple(formula(stage, one_process, ranks))) / 1e6 for ranks in smooth]
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
    plan = [(link, list(STAGES), 5) for link in LINKS]
    by_size = {ranks: run_ranks(alternate, ranks, plan, timeout=900) for ranks in SIZES}
    for i, (link, axes) in enumerate(zip(LINKS, panels, strict=True)):
        seconds = [medians([times[i] for times, _ in by_size[ranks]]) for ranks in SIZES]
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
    # Ranks are forked, so they start with all modules imported.
    preload("benchmarks.zero_steps")
    if args.plot is not None:
        args.plot.mkdir(parents=True, exist_ok=True)
        plot_memory(args.plot / "memory.png")
        plot_step_time(args.plot / "step_time.png")
        return
    rows = measure(args.quick)
    if args.json:
        side_by_side.show("zero", rows, True, "")
        return
    for ranks in sorted({one["world_size"] for one in rows}):
        title = f"{ranks} ranks, GPT of 12.9 M parameters, AdamW"
        side_by_side.show("zero", [one for one in rows if one["world_size"] == ranks], False, title)


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
