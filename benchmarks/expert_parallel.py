"""Measure expert parallelism against data parallelism whose ranks all hold all experts.

    python benchmarks/expert_parallel.py                 tables; --json for one JSON line
    python benchmarks/expert_parallel.py --quick         4 ranks only, fewer sizes and runs

A layer has 8 experts of width d, and each rank has t tokens that pass 2 of them. Both sides run the same code
with the same tokens and weights. `expert_parallel` divides the experts among the ranks and sends tokens.
`replicated` is the same with --expert-ranks 1: every rank holds all experts and averages their gradients.

- `formula`: the bytes that a rank sends for the experts of a layer, if all experts are chosen equally. The
  ratio is t k / (4 E d): below 1 expert parallelism sends less.
- `sent`: the bytes of a whole step, for the rank that sends most, with the experts that its tokens chose and
  the gradients of everything that is not an expert.
- `step`: forward, backward and the averages of gradients. No optimizer runs. On replicas it would update
  all experts on every rank, which takes longer.
"""

import dataclasses
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro

from benchmarks import side_by_side
from benchmarks.expert_parallel_steps import MOE, steps
from benchmarks.side_by_side import medians, row
from lab.ranks import run_ranks
from lab.ranks.forked import preload

Rows = list[dict[str, Any]]
LINKS = ["loopback", "1gbit"]
# (d, t): the two sides send equally much if t = 16 d.
SIZES = [(64, 256), (64, 1024), (64, 4096), (128, 512), (256, 512)]
QUICK = [(64, 1024), (64, 4096), (256, 512)]


@dataclasses.dataclass
class Args:
    """Measure expert parallelism against the same experts on every rank."""

    quick: bool = False
    """Measure 4 ranks only, fewer sizes, and fewer runs."""
    json: bool = False
    """Print one JSON line instead of a table."""


def formula(width: int, tokens: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a rank sends for the experts of a layer: as tokens, and as gradients."""
    as_tokens = 4 * tokens * MOE.top_k * width * (ranks - 1) // ranks
    as_gradients = 2 * MOE.num_experts * 8 * width**2 * (ranks - 1) // ranks
    return 4 * as_tokens, 4 * as_gradients


def rows_of(ranks: int, sizes: list[tuple[int, int]], runs: int) -> Rows:
    """Return the rows of each size on this number of ranks."""
    rows: Rows = []
    by_rank = run_ranks(steps, ranks, sizes, LINKS, runs, timeout=600)
    for (width, tokens), results in zip(sizes, zip(*by_rank, strict=True), strict=True):
        where, against = f"d={width} t={tokens}", "replicated"
        ours, theirs = formula(width, tokens, ranks)
        rows.append(row(f"formula {where}", against, "any", ours, theirs, world_size=ranks, unit="bytes"))
        ours, theirs = (max(sent[name] for sent, _ in results) for name in ("expert_parallel", against))
        rows.append(row(f"sent {where}", against, "any", ours, theirs, world_size=ranks, unit="bytes"))
        for i, link in enumerate(LINKS):
            seconds = medians([times[i] for _, times in results])
            both = seconds["expert_parallel"], seconds[against]
            rows.append(row(f"step {where}", against, link, *both, world_size=ranks))
    return rows


def main(args: Args) -> None:
    preload("benchmarks.expert_parallel_steps")  # ranks are forked, so they start with all modules imported
    by_ranks = {4: rows_of(4, QUICK, 3)} if args.quick else {n: rows_of(n, SIZES, 7) for n in (2, 4)}
    if args.json:
        rows = [one for rows in by_ranks.values() for one in rows]
        side_by_side.show("expert_parallel", rows, True, "")
        return
    for ranks, rows in by_ranks.items():
        title = f"expert_parallel against replicated, {ranks} ranks"
        side_by_side.show("expert_parallel", rows, False, title)


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
