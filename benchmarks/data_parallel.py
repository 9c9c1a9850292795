"""Compare our data parallel training with PyTorch's DDP: step times, peak memory, hidden communication.

    python benchmarks/data_parallel.py                       a table; --json for one JSON line
    python benchmarks/data_parallel.py --quick               fewer rows
    python benchmarks/data_parallel.py --plot buckets.png    step time against bucket size, and the prediction

Two ranks train a GPT of 12.9 million parameters. All variants share one process group and take turns, step
by step (benchmarks/side_by_side.py). Slow links are software links (comm/wire/slow_link.py), the same
for ours and DDP. On a slow link DDP sends through the hook of data_parallel/train_ddp.py; on loopback it is
unchanged.

`ddp` is DDP with its default buckets (first 1 MiB, then 25 MiB), and `ddp_same_cap` has our bucket size.
`flat` is one all-reduce of all gradients after the backward. In rows against `ideal` a clock replaces
compute, and the ideal step is forward + backward of the last layer + time on the wire.
"""

import dataclasses
import functools
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro
from matplotlib.figure import Figure

from benchmarks import side_by_side
from benchmarks.data_parallel_steps import CONFIG, alternate, hidden, metronome, peak, ready_times
from benchmarks.side_by_side import median_of_slowest, medians
from comm import cost
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import fill
from lab.models.model import GPT
from lab.ranks import run_ranks
from lab.ranks.forked import preload
from training.predict import step_seconds

RANKS = 2
PLOT_CAPS = [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64]  # MiB


@dataclasses.dataclass
class Args:
    """Compare our data parallel training with PyTorch's DDP."""

    quick: bool = False
    """Measure fewer rows, with fewer runs."""
    plot: Path | None = None
    """Draw step time against bucket size into this file (png or svg), and measure nothing else."""
    plot_link: str = "1gbit,2ms"
    """The link for --plot: bandwidth, and optionally latency."""
    json: bool = False
    """Print one JSON line instead of a table."""


def against_bucket_size(args: Args) -> dict[float, tuple[float, float]]:
    """Return measured and predicted seconds of a step for each bucket size in PLOT_CAPS."""
    names = [f"bucket_overlap {cap}" for cap in PLOT_CAPS]
    by_rank = run_ranks(alternate, RANKS, [(args.plot_link, names, 5)], timeout=900)
    measured = medians([seconds for [seconds] in by_rank])
    computing = run_ranks(ready_times, RANKS, timeout=300)
    compute, update, ready = max(computing, key=lambda rank: rank[0])
    link, parameters = slow_link.parse(args.plot_link), list(GPT(CONFIG).parameters())
    position = {parameter: i for i, parameter in enumerate(parameters)}
    result = {}
    for cap, name in zip(PLOT_CAPS, names, strict=True):
        messages = [
            (max(ready[position[p]] for p in bucket), sum(p.nbytes for p in bucket))
            for bucket in fill(reversed(parameters), min(0.25, cap), cap)
        ]
        wire = functools.partial(cost.seconds, "all_reduce", "ring", ranks=RANKS, link=link)
        result[cap] = (
            measured[name],
            step_seconds(compute, update, messages, lambda size: wire(num_bytes=size)),
        )
    return result


def plot(result: dict[float, tuple[float, float]], link: str, path: Path) -> None:
    """Draw step time against bucket size: small buckets cost latency, large ones delay the last bucket."""
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


row = functools.partial(side_by_side.row, world_size=RANKS)


def measure(quick: bool) -> list[dict]:
    rows: list[dict] = []
    caps = ["1", "4", "25"]
    everything = ["ddp", *(f"{kind} {cap}" for kind in ("bucket_overlap", "ddp") for cap in caps)]
    everything += ["naive", "flat", "overlap"]
    same_cap = ["bucket_overlap 4", "ddp 4"]
    plan = [("loopback", everything, 7), ("1gbit", everything, 7), ("200mbit", everything, 3)]
    if quick:
        plan = [
            ("loopback", same_cap, 4),
            ("1gbit", ["ddp", *same_cap, "naive"], 3),
            ("200mbit", same_cap, 1),
        ]
    # Variants on slow links are built and warmed up once for all slow links.
    by_rank = run_ranks(alternate, RANKS, plan[:1], timeout=900)
    by_rank = [
        a + b for a, b in zip(by_rank, run_ranks(alternate, RANKS, plan[1:], timeout=900), strict=True)
    ]
    for (link, names, _), *ranks in zip(plan, *by_rank, strict=True):
        seconds = medians(ranks)
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
    ticking = run_ranks(metronome, RANKS, "1gbit", 0.02, 3 if quick else 7, timeout=300)
    times, (_, ideal) = median_of_slowest([seconds for seconds, _ in ticking]), ticking[0]
    rows.append(row("bucket_overlap metronome 20ms", "ideal", "1gbit", times, ideal))
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
    # Ranks are forked, so they start with all modules imported.
    preload("benchmarks.data_parallel_steps")
    if args.plot is not None:
        plot(against_bucket_size(args), args.plot_link, args.plot)
        return
    title = f"{RANKS} ranks, GPT of 12.9 M parameters"
    side_by_side.show("data_parallel", measure(args.quick), args.json, title)


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
