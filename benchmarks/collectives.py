"""Compare our collectives with torch's own on gloo: every operation and pattern, from 1 KiB to 64 MiB.

    python benchmarks/collectives.py --world-size 4              a table; --json for one JSON line
    python benchmarks/collectives.py --world-size 2 --quick      only large all_reduce and reduce_scatter
    python benchmarks/collectives.py --plot all_reduce.png       also a picture: time against size

The row `all_reduce ring` is the textbook's (comm/algorithms/ring.py). `all_reduce pipelined_ring` is the same
ring with chunks in segments, which training uses. Our patterns and torch's take turns
in one group, so that other load on the machine slows down both. A run takes as long as its slowest rank. The
ratio is that of the medians: below 1 ours is faster.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from matplotlib.figure import Figure

from benchmarks.side_by_side import KIB, MIB, leave_gloo_as_it_is, medians, row, show, timed
from comm import collectives as c
from lab.cluster import Cluster
from lab.ranks import run_ranks

SIZES = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
NOTES = {"ring": "textbook, used in training", "pipelined_ring": "in segments"}
QUICK = {"reduce_scatter": [16 * MIB, 64 * MIB], "all_reduce": [4 * MIB, 16 * MIB, 64 * MIB]}


@dataclasses.dataclass
class Args:
    """Compare our collectives with torch's own."""

    world_size: int = 2
    """Number of ranks: 1, 2, 4 or 8."""
    runs: int = 15
    """Timed runs of each operation, after two that do not count. Large tensors get fewer."""
    quick: bool = False
    """Measure only large sizes of reduce_scatter and all_reduce."""
    plot: Path | None = None
    """File for a picture (png or svg) of time against size for every all-reduce."""
    json: bool = False
    """Print one JSON line instead of a table."""


def operations(
    one: torch.Tensor, full: torch.Tensor, shard: torch.Tensor, out: torch.Tensor, reduction: str = "mean"
) -> dict[str, Callable[[str], object]]:
    """Return a function for each collective, on these tensors; it takes the pattern.

    `full` and `out` consist of one `shard` for each rank. `one` may have any size.
    """
    return {
        "broadcast": lambda pattern: c.broadcast(one, pattern=pattern),
        "scatter": lambda pattern: c.scatter(shard, full, pattern=pattern),
        "gather": lambda pattern: c.gather(shard, out, pattern=pattern),
        "reduce": lambda pattern: c.reduce(one, pattern=pattern),
        "all_gather": lambda pattern: c.all_gather(out, shard, pattern=pattern),
        "reduce_scatter": lambda pattern: c.reduce_scatter(shard, full, pattern=pattern),
        "all_reduce": lambda pattern: c.all_reduce(one, op=reduction, pattern=pattern),
        "all_to_all": lambda pattern: c.all_to_all(out, full, pattern=pattern),
    }


def measure(cluster: Cluster, args: Args) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return the seconds of every run on this rank, by operation and size, then by pattern."""
    seconds: dict[tuple[str, int], dict[str, list[float]]] = {}
    for size in SIZES:
        full, out = torch.ones(size // 4), torch.empty(size // 4)
        shard = torch.empty(size // 4 // cluster.world_size)
        for op, call in operations(full, full, shard, out).items():
            if args.quick and size not in QUICK.get(op, []):
                continue
            patterns = (*c.PATTERNS[op], "torch")
            times = seconds[op, size] = {pattern: [] for pattern in patterns}
            runs = max(5, min(args.runs, 200 * MIB // size))
            for run in range(2 + runs):
                for pattern in patterns:
                    took = timed(functools.partial(call, pattern))
                    if run >= 2:
                        times[pattern].append(took)
    return seconds


def rows(world_size: int, by_rank: list[dict]) -> list[dict]:
    """Return a row for each operation, size and pattern of ours, against torch's."""
    table = []
    for op, size in by_rank[0]:
        median = medians([rank[op, size] for rank in by_rank])
        for pattern in c.PATTERNS[op]:
            place = f"{op} {pattern}", "torch", "loopback"
            sides = median[pattern], median["torch"]
            table.append(row(*place, *sides, world_size=world_size, num_bytes=size))
    return table


def plot(result: list[dict], path: Path) -> None:
    """Draw seconds against bytes: latency counts at the left, bandwidth at the right."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    of_all_reduce = [row for row in result if row["what"].startswith("all_reduce ")]
    for pattern in c.PATTERNS["all_reduce"]:
        mine = [row for row in of_all_reduce if row["what"] == f"all_reduce {pattern}"]
        label = f"{pattern} ({NOTES[pattern]})" if pattern in NOTES else pattern
        axes.plot([row["bytes"] for row in mine], [row["ours"] for row in mine], marker="o", label=label)
    axes.plot(
        [row["bytes"] for row in mine],
        [row["theirs"] for row in mine],
        "k--",
        marker="s",
        label="torch (gloo)",
    )
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds (median)")
    axes.set_title(f"all-reduce on {result[0]['world_size']} ranks, loopback")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    if any(size // 4 % args.world_size for size in SIZES):
        raise SystemExit(
            f"--world-size {args.world_size}: torch's own collectives need equal shards; choose 1, 2, 4 or 8."
        )
    result = rows(args.world_size, run_ranks(measure, args.world_size, args, timeout=900))
    if args.plot is not None:
        plot(result, args.plot)
    title = f"ours against torch.distributed on gloo, {args.world_size} ranks, loopback"
    show("collectives", result, args.json, title)


if __name__ == "__main__":
    leave_gloo_as_it_is()
    main(tyro.cli(Args))
