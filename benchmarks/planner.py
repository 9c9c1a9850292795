"""Compare what the planner predicts with what ranks of this machine measure, plan by plan.

    python benchmarks/planner.py               a table; --json for one JSON line
    python benchmarks/planner.py --quick       few plans and steps

The machine is measured as `sharding_strategy: auto` does it: rates of a core, and alpha and beta of the
link. Then 4 ranks train as each plan says, with AdamW and the simulated link. Each plan has a row for the
time of a step, and one for memory: the peak of the fullest rank's process, above what Python, torch and a
tiny model take. `ours` is measured, `theirs` is predicted.

These plans are measured: of each way to divide the ranks and to run the division (ZeRO, schedule, sequence
parallelism, recomputation) the one whose number of microbatches is predicted to be the best, and of these the
fastest, and the first of each division. What is left out is predicted to be slower.

The benchmark ends with the medians of the absolute errors, and with the time of the planner's choice over
that of the fastest plan that was measured.
"""

import dataclasses
import gc
import statistics
from typing import Any

from benchmarks import side_by_side
from benchmarks.side_by_side import GPT_13M, Rows, Step, row, timed, tokens
from comm.cost import Link
from comm.wire import slow_link
from hybrid_parallel.mesh import AXES, Mesh
from hybrid_parallel.planner.auto import measured_machine
from hybrid_parallel.planner.search import Plan, best_by_division, plans
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.planner.table import describe
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.trace import meter
from lab.trace.memory import resident_bytes

RANKS, LINK, BATCH = 4, "1gbit", 8  # windows of 256 tokens in a step
# A model of the same layers that holds almost nothing.
TINY = dataclasses.replace(GPT_13M, width=8 * GPT_13M.num_heads, block_size=16)
FASTEST, QUICK = 12, 3  # plans: the fastest on paper beside the best of each division; with --quick of both


def train(cluster: Cluster, sizes: ParallelSizes, link: Link, steps: int) -> tuple[list[float], int]:
    """Train as `sizes` says, and return the seconds of each step, and the bytes at the peak of one.

    Memory is measured in a step without the link, and time afterwards with it.
    """
    side_by_side.unmap_freed_memory()
    mesh = Mesh(cluster, sizes)
    training(mesh, TINY)()  # code is loaded, and connections are made
    gc.collect()
    base = resident_bytes()
    step = training(mesh, GPT_13M)
    step()  # the first one ends with the optimizer's state
    gc.collect()
    meter.reset_peak_memory(cluster.device)
    step()
    peak = meter.peak_memory(cluster.device) or 0
    side_by_side.keep_freed_memory()
    step()
    with slow_link.slowed(link):
        return [timed(step) for _ in range(steps)], peak - base


def training(mesh: Mesh, config: GPTConfig) -> Step:
    """Return a step of a new model on the mesh."""
    rows = BATCH // mesh.sizes.data
    x, y = tokens(config, rows)
    hybrid = put_on_mesh(GPT(config), mesh, x[: rows // mesh.sizes.microbatches], lr=1e-3)

    def step() -> None:
        hybrid.optimizer.zero_grad()
        hybrid.backward(x, y)
        hybrid.optimizer.step()

    return step


def selected(found: list[Plan], quick: bool) -> list[Plan]:
    """Return the plans to measure: the fastest ways on paper, and the best one of each division."""
    best: dict[object, Plan] = {}
    for plan in found:
        best.setdefault(dataclasses.replace(plan.sizes, microbatches=1), plan)
    divisions = best_by_division(found)
    if quick:
        return divisions[:QUICK]
    return list(dict.fromkeys([*list(best.values())[:FASTEST], *divisions]))


def rows_of(plan: Plan, of_ranks: list[tuple[list[float], int]]) -> Rows:
    """Return what was measured of a plan beside what was predicted: its time, and its memory."""
    seconds = side_by_side.median_of_slowest([times for times, _ in of_ranks])
    held = max(peak for _, peak in of_ranks)
    axes = " x ".join(str(getattr(plan.sizes, axis)) for axis in AXES)
    plan_is = {"label": f"gpt {axes}, {describe(plan.sizes)}", "sizes": dataclasses.asdict(plan.sizes)}
    time = row("gpt", "prediction", seconds, plan.step_seconds, RANKS, LINK)
    memory = row("gpt memory", "prediction", held, plan.memory.total, RANKS, LINK, "bytes")
    return [time | plan_is, memory | plan_is]


def summary(rows: Rows) -> dict[str, Any]:
    """Return the medians of the absolute errors, and the choice's time over that of the fastest plan."""
    times, memory = rows[::2], rows[1::2]
    best = min(times, key=lambda one: one["ours"])
    seconds_error, memory_error = (
        statistics.median(abs(one["theirs"] / one["ours"] - 1) for one in part) for part in (times, memory)
    )
    return {
        "measured_plans": len(times),
        "median_seconds_error": seconds_error,
        "median_memory_error": memory_error,
        "choice": times[0]["label"],
        "best": best["label"],
        "choice_over_best": times[0]["ours"] / best["ours"],
    }


def main(args: side_by_side.Args) -> None:
    link = slow_link.parse(LINK)
    machine = run_ranks(measured_machine, RANKS, link, timeout=120)[0]
    found = plans(ModelShape(**vars(GPT_13M)), machine, RANKS, BATCH, precision="float32")
    fit = [plan for plan in found if plan.seconds is not None]
    rows: Rows = []
    for plan in selected(fit, args.quick):
        steps = 2 if args.quick else 3
        rows += rows_of(plan, run_ranks(train, RANKS, plan.sizes, link, steps, timeout=300))
    said = {"model": "gpt", "feasible_plans": len(fit)} | summary(rows)
    side_by_side.show("planner", rows, args, f"{LINK}: measured, predicted", summary=[said])
    if not args.json:
        errors = [f"{said[f'median_{what}_error']:.1%} of the {what}" for what in ("seconds", "memory")]
        plans_measured = f"{said['measured_plans']} of {said['feasible_plans']} feasible plans"
        print(f"{plans_measured}; median errors {' and '.join(errors)}")
        print(f"the choice takes {said['choice_over_best']:.2f} of the time of the fastest: {said['best']}")


if __name__ == "__main__":
    side_by_side.start(__file__, with_torch=False)
