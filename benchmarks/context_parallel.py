"""Measure context parallelism: the balance of cuts, ring attention beside its formula, memory, step times.

    python benchmarks/context_parallel.py                 tables; --json for one JSON line
    python benchmarks/context_parallel.py --quick         fewer runs

- `makespan`: forward and backward of ring attention under a causal mask, against the time that a rank would
  take if all computed equally much. A clock replaces computing (context_parallel/clock.py), because more
  ranks than cores would slow each other down.
- `ring`: the same on a slow link, against the formula (context_parallel/predict.py), where computing takes
  longer than a message, and where it takes less.
- `activations`: what autograd keeps on a rank for 8192 tokens, against one process.
- `step`: forward, backward and the sum of gradients of a GPT with ring attention, with all-to-all attention,
  and with the sequence parallelism of lesson 3, on the same sequence. PyTorch has a context parallelism of
  its own, which does not run on CPUs.
"""

import dataclasses
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro

from benchmarks import side_by_side
from benchmarks.context_parallel_steps import activations, clocked, steps
from benchmarks.side_by_side import medians, row
from comm.transport import slow_link
from context_parallel.predict import balanced_pairs, ring_seconds, step_pairs
from context_parallel.run import CUTS
from lab.forked import preload
from lab.model import GPTConfig
from lab.ranks import run_ranks

Rows = list[dict[str, Any]]
LINK = "1gbit"
LENGTH, HEADS = 4096, 8  # of the clocked attention; a head has 64 numbers
CONFIG = GPTConfig(block_size=8192, num_layers=2, num_heads=8, width=256)


@dataclasses.dataclass
class Args:
    """Measure ring attention and all-to-all attention."""

    quick: bool = False
    """Do fewer runs."""
    json: bool = False
    """Print one JSON line instead of a table."""


def makespan_rows(runs: int) -> Rows:
    """Return how much longer each cut takes than a balanced one."""
    rows, ranks, seconds = [], 4, 1.6
    for cut in ("contiguous", "zigzag"):
        measured = medians(run_ranks(clocked, ranks, cut, LENGTH, seconds, 1, "loopback", runs, timeout=300))
        made = CUTS[cut](LENGTH, ranks)
        ideal = 3 * balanced_pairs(made) * seconds / (LENGTH * (LENGTH + 1) / 2)
        rows.append(row(f"makespan {cut}", "balanced", "loopback", measured["ring"], ideal, world_size=ranks))
    return rows


def ring_rows(runs: int, ranks_of_rows: tuple[int, ...]) -> Rows:
    """Return ring attention on a slow link beside its formula."""
    rows, link = [], slow_link.parse(LINK)
    for ranks in ranks_of_rows:
        block = 2 * HEADS * LENGTH // ranks * 64 * 4
        for name, factor in (("compute-bound", 4.0), ("wire-bound", 0.5)):
            # In units of what a message takes, which a block of full attention takes, too, at factor 1.
            seconds = factor * (link.alpha + link.beta * block) * ranks**2 / 2
            pairs = step_pairs(CUTS["zigzag"](LENGTH, ranks))
            per_pair = seconds / (LENGTH * (LENGTH + 1) / 2)
            formula = ring_seconds(pairs, per_pair, block, link)
            arguments = "zigzag", LENGTH, seconds, HEADS, LINK, runs
            measured = medians(run_ranks(clocked, ranks, *arguments, timeout=300))
            rows.append(row(f"ring {name}", "formula", LINK, measured["ring"], formula, world_size=ranks))
    return rows


def activation_rows() -> Rows:
    """Return what autograd keeps on the rank that keeps most, against one process."""
    [alone] = run_ranks(activations, 1, CONFIG, 8192, timeout=300)
    by_rank = run_ranks(activations, 4, CONFIG, 8192, timeout=300)
    return [
        row(
            f"{name} activations",
            "one process",
            "loopback",
            max(rank[name] for rank in by_rank),
            alone["plain"],
            world_size=4,
            unit="bytes",
        )
        for name in ("ring", "all_to_all")
    ]


def step_rows(runs: int) -> Rows:
    """Return steps of a GPT, against sequence parallelism."""
    rows, links = [], ["loopback", LINK]
    for ranks in (2, 4):
        by_rank = run_ranks(steps, ranks, CONFIG, 2048, links, runs, timeout=600)
        for i, link in enumerate(links):
            seconds = medians([times[i] for times in by_rank])
            theirs = seconds.pop("sequence_parallel")
            rows += [
                row(f"{name} step", "sequence_parallel", link, ours, theirs, world_size=ranks)
                for name, ours in seconds.items()
            ]
    return rows


def main(args: Args) -> None:
    preload("benchmarks.context_parallel_steps")  # ranks are forked, so they start with all modules imported
    runs = 3 if args.quick else 7
    rows = makespan_rows(2) + ring_rows(2, (4,)) if args.quick else makespan_rows(5) + ring_rows(5, (2, 4))
    rows += [*activation_rows(), *step_rows(runs)]
    if args.json:
        side_by_side.show("context_parallel", rows, True, "")
        return
    for ranks in (2, 4):
        shown = [one for one in rows if one["world_size"] == ranks]
        side_by_side.show("context_parallel", shown, False, f"{ranks} ranks")


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
