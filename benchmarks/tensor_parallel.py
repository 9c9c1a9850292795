"""Compare our tensor and sequence parallelism with PyTorch's DTensor: step times, bytes, cross entropy.

    python benchmarks/tensor_parallel.py                     tables; --json for one JSON line
    python benchmarks/tensor_parallel.py --quick             fewer runs, and no rows of bytes sent
    python benchmarks/tensor_parallel.py --link 200mbit      another slow link than 1gbit

The ranks train a GPT of 12.9 million parameters with tied weights on the same two windows of 256 tokens. A
step is forward, backward and SGD. All variants share one process group and take turns, step by step. DTensor
is used as in tensor_parallel/train_dtensor.py, with one all-reduce for q, k and v.

Slow links are software links (comm/wire/slow_link.py), the same for ours and DTensor. On a slow link
DTensor's collectives go through comm: `train_dtensor.by_comm` replaces the kernels of torch's operators
`_c10d_functional.all_reduce`, `wait_tensor`, `all_gather_into_tensor` and `reduce_scatter_tensor` by calls of
comm with pattern "torch". DTensor decides when to start and when to wait, and gloo moves the bytes. The link
adds the time of the best-known algorithm, and for gloo's reduce-scatter the time of an all-reduce. On
loopback DTensor is unchanged.

The cross entropy has 512 tokens and a vocabulary of 32,768 entries. It is measured on loopback, forward and
backward. Its memory is what the process needs beyond the logits. "one process" is F.cross_entropy of the full
logits.
"""

import dataclasses
import functools
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro

from benchmarks import side_by_side
from benchmarks.side_by_side import medians
from benchmarks.tensor_parallel_steps import MODES, alternate, loss_peak, losses
from lab.ranks import run_ranks
from lab.ranks.forked import preload

Rows = list[dict[str, Any]]


@dataclasses.dataclass
class Args:
    """Compare our tensor parallel layers with PyTorch's DTensor."""

    quick: bool = False
    """Do fewer runs, and leave out the bytes sent."""
    link: str = "1gbit"
    """The slow link: bandwidth, and optionally latency, such as 1gbit or 200mbit,1ms."""
    json: bool = False
    """Print one JSON line instead of tables."""


def step_rows(ranks: int, plan: list[tuple[str, int]], warmup: int, with_bytes: bool) -> Rows:
    """Return rows for the step times of both modes on each link, and for the bytes they send."""
    row = functools.partial(side_by_side.row, world_size=ranks)
    by_rank = run_ranks(alternate, ranks, plan, warmup, with_bytes, timeout=900)
    rows: Rows = []
    for i, (link, _) in enumerate(plan):
        seconds = medians([times[i] for times, _ in by_rank])
        rows += [row(m, "dtensor", link, seconds[f"ours {m}"], seconds[f"dtensor {m}"]) for m in MODES]
    if with_bytes:
        for m in MODES:
            ours, theirs = (max(sent[f"{who} {m}"] for _, sent in by_rank) for who in ("ours", "dtensor"))
            rows.append(row(f"{m} bytes sent", "dtensor", plan[-1][0], ours, theirs, unit="bytes"))
    return rows


def loss_rows(ranks: int, runs: int) -> Rows:
    """Return rows for the time and the memory of the cross entropy."""
    row = functools.partial(side_by_side.row, link="loopback", world_size=ranks)
    seconds = medians(run_ranks(losses, ranks, runs, timeout=300))
    ours, theirs = (max(run_ranks(loss_peak, ranks, kind, timeout=300)) for kind in ("ours", "dtensor"))
    [full] = run_ranks(loss_peak, 1, "full", timeout=300)
    return [
        row("cross entropy time", "dtensor", ours=seconds["ours"], theirs=seconds["dtensor"]),
        row("cross entropy memory", "one process", ours=ours, theirs=full, unit="bytes"),
        row("cross entropy memory", "dtensor", ours=ours, theirs=theirs, unit="bytes"),
    ]


def measure(args: Args) -> Rows:
    rows: Rows = []
    for ranks in (2, 4):
        plan = [("loopback", 3 if args.quick else 11), (args.link, 3 if args.quick else 7)]
        rows += step_rows(ranks, plan, 1 if args.quick else 2, with_bytes=not args.quick)
        rows += loss_rows(ranks, 5 if args.quick else 15)
    return rows


def main(args: Args) -> None:
    # Ranks are forked, so they start with all modules imported.
    preload("benchmarks.tensor_parallel_steps")
    rows = measure(args)
    if args.json:
        side_by_side.show("tensor_parallel", rows, True, "")
        return
    for ranks in sorted({one["world_size"] for one in rows}):
        shown = [one for one in rows if one["world_size"] == ranks]
        side_by_side.show("tensor_parallel", shown, False, f"{ranks} ranks, GPT of 12.9 M parameters")


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
