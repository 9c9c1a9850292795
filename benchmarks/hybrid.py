"""Compare a training step on a mesh with that of the one lesson, where one axis has all ranks.

    python benchmarks/hybrid.py                     a table; --json for one JSON line
    python benchmarks/hybrid.py --quick             fewer runs, 2 ranks only

2 and 4 ranks train a GPT of 6.4 million parameters on 8 windows of 128 tokens. In the row `experts`, 4
experts take the place of each MLP. Both sides do what their scripts do in a step, with AdamW and the mean
loss for the report. They take turns in the same processes, step by step.
"""

import dataclasses
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro

from benchmarks import side_by_side
from benchmarks.hybrid_steps import LESSONS, alternate
from benchmarks.side_by_side import medians
from lab.ranks import run_ranks
from lab.ranks.forked import preload


@dataclasses.dataclass
class Args:
    """Compare a training step on a mesh with that of the single technique."""

    quick: bool = False
    """Measure fewer runs, on 2 ranks only."""
    json: bool = False
    """Print one JSON line instead of a table."""


def rows_of(ranks: int, runs: int, warmup: int) -> list[dict[str, Any]]:
    by_rank = run_ranks(alternate, ranks, list(LESSONS), runs, warmup, timeout=900)
    rows = []
    for what, lesson in LESSONS.items():
        seconds = medians([rank[what] for rank in by_rank])
        ours, theirs = seconds["mesh"], seconds["lesson"]
        rows.append(side_by_side.row(f"hybrid {what}", lesson, "loopback", ours, theirs, world_size=ranks))
    return rows


def main(args: Args) -> None:
    preload("benchmarks.hybrid_steps")  # ranks are forked, so they start with all modules imported
    runs, warmup = (5, 2) if args.quick else (21, 3)
    of_ranks = {ranks: rows_of(ranks, runs, warmup) for ranks in ((2,) if args.quick else (2, 4))}
    if args.json:
        side_by_side.show("hybrid", [row for rows in of_ranks.values() for row in rows], True, "")
        return
    for ranks, rows in of_ranks.items():
        side_by_side.show("hybrid", rows, False, f"{ranks} ranks, GPT of 6.4 M parameters")


if __name__ == "__main__":
    main(tyro.cli(Args))
