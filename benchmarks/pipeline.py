"""Compare our pipelines with torch.distributed.pipelining, naive model parallelism, theory and the simulator.

    python benchmarks/pipeline.py                    tables; --json for one JSON line
    python benchmarks/pipeline.py --quick            fewer runs and rows: neither memory nor recomputation
    python benchmarks/pipeline.py --tick 50ms        a slower clock

2 and 4 ranks train a GPT of 6.4 million parameters, tied, on 8 windows of 128 tokens in 8 microbatches. A
step is the forwards, the backwards, the sum of the tied gradients, and SGD. Both sides have the same stages
(pipeline_parallel/train_torch_pipelining.py), share one process group and take turns, step by step; torch
sends its messages itself. `peak memory` is that of the process, each in a fresh one; `above start` leaves out
Python and torch.

`1f1b` is compared with `naive`, which is naive model parallelism with the given number of microbatches; 1 is
the full batch at once. Both have 16 windows.

In `makespan` rows a clock replaces computing. On each rank, a microbatch's forward, input gradient and weight
gradient take one tick each, which is long enough for all ranks to send from the same few cores. The makespan
lasts from the start of the first action to the end of the last one, on all ranks. It is compared with the
formula and with the simulator, for these costs and for messages that take no time. These rows also show the
bubble, and the expected bubble in parentheses.

`recompute` is the same schedule, in which a stage keeps only its input. The bytes are the most activations
that a rank held. If a schedule defers weight gradients, they include what these need, with recomputation or
without.
"""

import dataclasses
import functools
import statistics
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro

from benchmarks import side_by_side
from benchmarks.pipeline_steps import (
    MICROBATCHES,
    Beat,
    against_naive,
    against_torch,
    metronome,
    peak,
    recomputation,
)
from benchmarks.side_by_side import medians
from lab.ranks import run_ranks
from lab.ranks.forked import preload
from pipeline_parallel.analysis import theory
from pipeline_parallel.analysis.simulate import Costs, simulate
from pipeline_parallel.schedules import stages_per_rank, table_of
from training.validate import tick_seconds

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
CHUNKS = 2
Rows = list[dict[str, Any]]


@dataclasses.dataclass
class Args:
    """Compare pipeline schedules with those of torch, and with the theory."""

    quick: bool = False
    """Measure fewer rows, without memory and recomputation, with fewer runs."""
    tick: str = "20ms"
    """Tick of the clock that replaces computing in the makespan rows, such as 20ms."""
    json: bool = False
    """Print one JSON line instead of tables."""


def step_rows(ranks: int, runs: int, warmup: int) -> Rows:
    """Return step times of each schedule beside torch's."""
    by_rank = run_ranks(against_torch, ranks, SCHEDULES, runs, warmup, timeout=900)
    rows: Rows = []
    for schedule in SCHEDULES:
        seconds = medians([rank[schedule] for rank in by_rank])
        rows.append(_row(schedule, "torch", seconds["ours"], seconds["torch"], world_size=ranks))
    return rows


def naive_rows(microbatches: tuple[int, ...], runs: int, warmup: int) -> Rows:
    """Return 1F1B beside naive model parallelism on 2 ranks, for each number of microbatches."""
    seconds = medians(run_ranks(against_naive, 2, microbatches, runs, warmup, timeout=900))
    return [
        _row("1f1b", "naive", seconds["1f1b"], seconds[f"naive {m}"], world_size=2) | {"microbatches": m}
        for m in microbatches
    ]


def memory_rows(ranks: int) -> Rows:
    """Return the peak memory of each schedule beside torch's, of the rank that needs most."""
    row = functools.partial(_row, world_size=ranks, unit="bytes")
    rows: Rows = []
    for schedule in SCHEDULES:
        by_who = [run_ranks(peak, ranks, schedule, by_torch, timeout=300) for by_torch in (False, True)]
        whole = [max(top for top, _ in by_rank) for by_rank in by_who]
        added = [max(top - before for top, before in by_rank) for by_rank in by_who]
        rows.append(row(f"{schedule} peak memory", "torch", *whole))
        rows.append(row(f"{schedule} peak memory above start", "torch", *added))
    return rows


def recompute_rows(ranks: int, runs: int, warmup: int) -> Rows:
    """Return the time that recomputation costs and the memory that it saves."""
    by_rank = run_ranks(recomputation, ranks, SCHEDULES, runs, warmup, timeout=900)
    row = functools.partial(_row, world_size=ranks)
    rows: Rows = []
    for schedule in SCHEDULES:
        seconds = medians([rank[schedule][0] for rank in by_rank])
        rows.append(row(f"{schedule} recompute", schedule, seconds["recompute"], seconds["plain"]))
        ours, theirs = (max(rank[schedule][1][name] for rank in by_rank) for name in ("recompute", "plain"))
        rows.append(row(f"{schedule} recompute", schedule, ours, theirs, unit="bytes"))
    return rows


def makespan_rows(ranks: int, rounds: tuple[int, ...], tick: float, runs: int) -> Rows:
    """Return rows for each schedule's makespan by the clock; `rounds` has the microbatches for each rank."""
    plan = [(schedule, times * ranks) for schedule in SCHEDULES for times in rounds]
    by_rank = run_ranks(metronome, ranks, plan, tick, runs, timeout=900)
    rows: Rows = []
    for at, (schedule, microbatches) in enumerate(plan):
        ours, bubble = _measured([rank[at] for rank in by_rank])
        chunks = stages_per_rank(schedule, CHUNKS)
        regular = (schedule, ranks, microbatches, chunks, tick, tick, tick)
        costs = Costs.equal(ranks * chunks, *[tick / chunks] * 3)
        simulation = simulate(table_of(schedule, ranks, microbatches, CHUNKS), costs)
        for against, seconds, expected in (
            ("theory", theory.makespan(*regular), theory.bubble(*regular)),
            ("simulator", simulation.makespan, simulation.bubble),
        ):
            assert seconds is not None, "there is a formula where all ticks are alike"
            one = _row(f"{schedule} makespan", against, ours, seconds, world_size=ranks)
            rows.append(one | {"microbatches": microbatches, "bubble": bubble, "bubble_expected": expected})
    return rows


def _measured(by_rank: list[list[Beat]]) -> tuple[float, float]:
    """Return the median makespan in seconds, and the median bubble."""
    makespans, bubbles = [], []
    for beats in zip(*by_rank, strict=True):
        makespan = max(beat.end for beat in beats) - min(beat.start for beat in beats)
        makespans.append(makespan / 1e9)
        bubbles.append(1 - sum(beat.busy for beat in beats) / (len(beats) * makespan))
    return statistics.median(makespans), statistics.median(bubbles)


def _row(what: str, against: str, ours: float, theirs: float, **others: Any) -> dict[str, Any]:
    return side_by_side.row(what, against, "loopback", ours, theirs, **others)


def measure(args: Args) -> Rows:
    tick = tick_seconds(args.tick)
    runs, warmup = (2, 1) if args.quick else (7, 2)
    # Ours and torch's differ by a few per cent only, so these rows need more runs than the others.
    rows = [row for ranks in (2, 4) for row in step_rows(ranks, 2 if args.quick else 11, warmup)]
    # A quick run has only the faster one of the two.
    rows += naive_rows((1,) if args.quick else (1, MICROBATCHES), runs, warmup)
    if args.quick:
        return rows + makespan_rows(4, (1,), tick, 2) + makespan_rows(8, (1,), tick, 2)
    for ranks in (2, 4):
        rows += memory_rows(ranks)
    rows += recompute_rows(4, 3, 1)
    for ranks in (2, 4, 8):
        rows += makespan_rows(ranks, (1, 2, 4), tick, 3)
    return rows


def main(args: Args) -> None:
    # Ranks are forked, so they start with all modules imported.
    preload("benchmarks.pipeline_steps")
    rows = measure(args)
    if args.json:
        side_by_side.show("pipeline", rows, True, "")
        return
    for ranks in sorted({one["world_size"] for one in rows}):
        shown = [one | {"what": _described(one)} for one in rows if one["world_size"] == ranks]
        side_by_side.show("pipeline", shown, False, f"{ranks} ranks, GPT of 6.4 M parameters")


def _described(row: dict[str, Any]) -> str:
    """Return the name of a row, with what the table has no columns for."""
    what, microbatches = row["what"], row.get("microbatches")
    if "bubble" in row:
        return (
            f"{what}, {microbatches} microbatches, bubble {row['bubble']:.3f} ({row['bubble_expected']:.3f})"
        )
    return what if microbatches is None else f"{what} ({microbatches} microbatches)"


if __name__ == "__main__":
    side_by_side.leave_gloo_as_it_is()
    main(tyro.cli(Args))
