"""Compare what the planner predicts with what ranks of this machine measure, plan by plan.

    python benchmarks/planner.py               tables for the GPT and the MLP; --json for one JSON line
    python benchmarks/planner.py --quick       the GPT alone, with few plans and steps
    python benchmarks/planner.py --all         every feasible plan, which takes more than half an hour

The machine is measured as `sharding_strategy: auto` does it: rates of a core, and alpha and beta of the
link. Then 4 ranks train as each plan says, with AdamW and the simulated link, and a row stands for each plan.
Memory is the peak of the fullest rank's process, above what Python, torch and a tiny model take.

By default these plans are measured: of each way to divide the ranks and to run the division (ZeRO, schedule,
sequence parallelism, recomputation) the one whose number of microbatches is predicted to be the best, and of
these the fastest, and the first of each division. What is left out is said, and predicted to be slower.
With --all each feasible plan trains for one timed step, and those are measured whose step took at most
1.1 times that of the fastest.

The benchmark ends with the medians of the absolute errors, and with the time of the planner's choice over
that of the fastest plan that was measured. `core seconds` are those of all ranks in a step: they depend less
on what else the machine does.
"""

import dataclasses
import json
import statistics
import sys
from typing import Any, Literal

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide the package of the same name

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.planner_steps import Config, Measured, calibrate, measure, screen
from comm.wire import slow_link
from hybrid_parallel.mesh import AXES
from hybrid_parallel.planner.search import Plan, best_by_division, plans
from hybrid_parallel.planner.shapes import shape_of_config
from hybrid_parallel.planner.table import describe
from lab.models.model import GPTConfig, MLPConfig
from lab.ranks import run_ranks
from lab.ranks.forked import preload
from lab.units import show_bytes, show_seconds

RANKS = 4
MODELS: dict[str, tuple[Config, int]] = {
    "gpt": (GPTConfig.named("13m"), 8),  # 12.9 million parameters; 8 windows of 256 tokens in a step
    "mlp": (MLPConfig(num_layers=8, width=1024), 2048),  # 6.4 million parameters; 2048 images in a step
}
FASTEST, QUICK = 12, 4  # plans: the fastest on paper beside the best of each division; with --quick of both
NEAR = 1.1  # with --all the plans are measured that took at most this share of the fastest plan's time
Row = dict[str, Any]


@dataclasses.dataclass
class Args:
    """Compare predicted and measured step times and memory of the planner's plans on 4 ranks."""

    model: Literal["both", "gpt", "mlp"] = "both"
    """Model that is planned for."""
    link: str = "1gbit"
    """Link between the ranks, as the train scripts take it."""
    steps: int = 3
    """Number of steps that are timed for each plan, after the warm-up."""
    quick: bool = False
    """Measure a few plans of one model, and two steps of each."""
    all: bool = False
    """Time a step of every feasible plan, and measure the fastest of them."""
    json: bool = False
    """Print one JSON line instead of tables."""


def selected(found: list[Plan], quick: bool) -> list[Plan]:
    """Return the plans to measure: the fastest ways on paper, and the best one of each division."""
    best: dict[object, Plan] = {}
    for plan in found:
        best.setdefault(dataclasses.replace(plan.sizes, microbatches=1), plan)
    fastest, divisions = list(best.values())[:FASTEST], best_by_division(found)
    if quick:
        return divisions[:QUICK]
    return fastest + [plan for plan in divisions if plan not in fastest]


def row_of(plan: Plan, of_ranks: list[Measured], model: str, link: str) -> Row:
    """Return what was predicted and measured of a plan."""
    seconds = side_by_side.median_of_slowest([rank.seconds for rank in of_ranks])
    row = side_by_side.row(model, "prediction", link, seconds, plan.step_seconds, world_size=RANKS)
    axes = " x ".join(str(getattr(plan.sizes, axis)) for axis in AXES)
    held = max(rank.above_base for rank in of_ranks)
    memory = {
        "bytes": held,
        "predicted_bytes": round(plan.memory_bytes),
        "memory_error": plan.memory_bytes / held - 1,
        "peak_process_bytes": max(rank.peak for rank in of_ranks),
    }
    cores = statistics.median(map(sum, zip(*(rank.core_seconds for rank in of_ranks), strict=True)))
    return (
        row
        | memory
        | {
            "seconds_error": plan.step_seconds / seconds - 1,
            "core_seconds": cores,
            "parts": dataclasses.asdict(plan.seconds) if plan.seconds else None,
            "sizes": dataclasses.asdict(plan.sizes),
            "plan": f"{axes}, {describe(plan.sizes)}",
        }
    )


def measure_model(model: str, args: Args) -> tuple[list[Row], dict[str, Any]]:
    """Return a row for each plan in the planner's order, and a summary."""
    config, batch = MODELS[model]
    link = slow_link.parse(args.link)
    machine = run_ranks(calibrate, RANKS, link, timeout=120)[0]
    found = plans(shape_of_config(config), machine, RANKS, batch, "float32")
    fit = [plan for plan in found if plan.seconds is not None]
    screened = screened_seconds(fit, model, args) if args.all else {}
    near = [plan for plan in screened if screened[plan] <= NEAR * min(screened.values())]
    chosen = list(dict.fromkeys(fit[:1] + near)) if args.all else selected(fit, args.quick)
    rows = []
    for plan in chosen:
        if not args.json:
            print(f"{model} {plan.sizes}, {describe(plan.sizes)}", file=sys.stderr, flush=True)
        steps = 2 if args.quick else args.steps
        of_ranks = run_ranks(measure, RANKS, plan.sizes, config, batch, link, steps, timeout=300)
        rows.append(row_of(plan, of_ranks, model, args.link))
    said = summary(model, rows, len(fit)) | screened_summary(screened)
    return rows, said | {"machine": dataclasses.asdict(machine)}


def screened_seconds(found: list[Plan], model: str, args: Args) -> dict[Plan, float]:
    """Return the seconds of one step of every plan."""
    config, batch = MODELS[model]
    link, seconds = slow_link.parse(args.link), {}
    for number, plan in enumerate(found, start=1):
        of_ranks = run_ranks(screen, RANKS, plan.sizes, config, batch, link, timeout=300)
        seconds[plan] = max(of_ranks)
        if not args.json:
            times = f"{show_seconds(plan.step_seconds)} predicted, {show_seconds(seconds[plan])} measured"
            print(f"{number} of {len(found)}: {plan.sizes}, {times}", file=sys.stderr, flush=True)
    return seconds


def screened_summary(seconds: dict[Plan, float]) -> dict[str, Any]:
    """Return how many plans were timed for one step, and how far the predictions are from these times."""
    if not seconds:
        return {}
    errors = [abs(plan.step_seconds / measured - 1) for plan, measured in seconds.items()]
    return {"screened_plans": len(seconds), "screened_median_seconds_error": statistics.median(errors)}


def summary(model: str, rows: list[Row], num_plans: int) -> dict[str, Any]:
    """Return the medians of the absolute errors, and the choice's time over that of the fastest plan."""
    best = min(rows, key=lambda row: row["ours"])
    return {
        "model": model,
        "feasible_plans": num_plans,
        "measured_plans": len(rows),
        "median_seconds_error": statistics.median(abs(row["seconds_error"]) for row in rows),
        "median_memory_error": statistics.median(abs(row["memory_error"]) for row in rows),
        "choice": rows[0]["plan"],
        "best": best["plan"],
        "choice_over_best": rows[0]["ours"] / best["ours"],
    }


def show(rows: list[Row], said: dict[str, Any]) -> None:
    """Print the table of a model, and its summary."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, title=f"{said['model']}, {RANKS} ranks, {rows[0]['link']}"
    )
    table.add_column(f"{' x '.join(AXES)}, how")
    heads = ("predicted", "measured", "error", "core seconds", "predicted", "measured", "error", "rank")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    order = sorted(rows, key=lambda row: row["ours"])
    for row in rows:
        table.add_row(
            row["plan"],
            show_seconds(row["theirs"]),
            show_seconds(row["ours"]),
            f"{row['seconds_error']:+.0%}",
            show_seconds(row["core_seconds"]),
            show_bytes(row["predicted_bytes"]),
            show_bytes(row["bytes"]),
            f"{row['memory_error']:+.0%}",
            str(order.index(row) + 1),
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(
        f"Median absolute error: {said['median_seconds_error']:.1%} of the step time, "
        f"{said['median_memory_error']:.1%} of the memory. The choice takes {said['choice_over_best']:.2f} "
        f"of the time of the fastest measured plan: {said['best']}." + left_out(said)
    )


def left_out(said: dict[str, Any]) -> str:
    """Return a sentence about the plans that have no row."""
    left = said["feasible_plans"] - said["measured_plans"]
    if "screened_plans" in said:
        return (
            f" One step of each of the {said['screened_plans']} feasible plans was timed (median absolute "
            f"error: {said['screened_median_seconds_error']:.1%}): {left} took more than {NEAR} times the "
            "fastest."
        )
    return f" {left} feasible plans were left out: on paper they are slower (--all times them)." * bool(left)


def main(args: Args) -> None:
    preload("benchmarks.planner_steps")  # ranks are forked, so they start with all modules imported
    models = ["gpt"] if args.quick and args.model == "both" else list(MODELS)
    models = models if args.model == "both" else [args.model]
    results = [measure_model(model, args) for model in models]
    if args.json:
        rows = [row for some, _ in results for row in some]
        print(json.dumps({"benchmark": "planner", "rows": rows, "summary": [said for _, said in results]}))
        return
    for rows, said in results:
        show(rows, said)


if __name__ == "__main__":
    main(tyro.cli(Args))
