"""Measure every technique in the same training, and write the tables and pictures of the READMEs.

    python benchmarks/table.py                      15 minutes: writes results/, README.md and the pictures
    python benchmarks/table.py --quick              few rows, 2 workers, 1 run: prints a table, writes nothing
    python benchmarks/table.py --only zero-3 1f1b   these techniques only: prints a table, writes nothing
    python benchmarks/table.py --from FILE          writes README.md and the pictures from stored results
    python benchmarks/table.py --check              says whether the READMEs show the stored results

Every technique trains the same GPT on the same global batch, by its own train script, with 1, 2 and 4
workers, on loopback and on a software link of 1 Gbit/s (table_runs.py). `vanilla` is one process without any
wrapper (vanilla.py), and a speed-up is the tokens per second over those of vanilla. `experts` alone trains
another model, so its speed-up is over its own run with one worker. `memory` is the largest peak of a rank,
less what it held before the training. The JSON line has `ours` and `theirs`, the mean tokens per second of
the technique and of what it is compared with, and the figures of each run.
"""

import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which other benchmarks would hide the lessons' packages

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import table_pages, table_plots
from benchmarks.side_by_side import row
from benchmarks.table_runs import (
    BATCH_SIZE,
    LINKS,
    MOE,
    QUICK,
    RUNS,
    SIZE,
    STEPS,
    TECHNIQUES,
    VANILLA,
    WORKERS,
    Job,
    Technique,
    jobs_of,
    measure,
)
from expert_parallel.config import make_expert
from expert_parallel.train_moe import Router
from lab.launch.errors import WorkbookError, reason
from lab.launch.threads import own_cores
from lab.models.model import GPT, GPTConfig
from training.run import WARMUP_STEPS

RESULTS = Path(__file__).resolve().parent / "results" / "table.json"


@dataclasses.dataclass
class Args:
    """Measure every technique in the same training, and write the tables and pictures of the READMEs."""

    quick: bool = False
    """Measure few techniques once, with 2 workers, and write nothing."""
    only: tuple[str, ...] = ()
    """Names of techniques to measure beside vanilla, such as zero-3 or 1f1b; then write nothing."""
    runs: int = RUNS
    """Number of runs of each row."""
    steps: int = STEPS
    """Number of steps of a run; the first two are not timed."""
    stored: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """File with stored results: write the READMEs and pictures from it, and measure nothing."""
    check: bool = False
    """Say whether the READMEs and pictures show the stored results, and measure nothing."""
    json: bool = False
    """Print one JSON line instead of a table."""


def main(args: Args) -> None:
    if args.check:
        refuse_stale(read(RESULTS) if RESULTS.exists() else None)
    elif args.stored is not None:
        write(read(args.stored))
    else:
        jobs = chosen(args)
        results = results_of(jobs, args)
        if args.json:
            print(json.dumps(results))
        else:
            show(results)
        if not (args.quick or args.only):
            write(results)


def chosen(args: Args) -> list[Job]:
    """Return the jobs to measure. Raise WorkbookError for a name that no technique has."""
    known = {technique.name.lower().replace(" ", "-"): technique for technique in TECHNIQUES}
    names = [name.lower() for name in args.only] or (QUICK if args.quick else list(known))
    if unknown := [name for name in names if name not in known]:
        raise WorkbookError(f"There is no technique {unknown[0]!r}: choose among {', '.join(known)}.")
    if args.runs < 1 or args.steps < 1:
        raise WorkbookError("--runs and --steps are numbers of at least 1.")
    techniques = [one for name, one in known.items() if one == VANILLA or name in names]
    jobs = jobs_of(techniques, WORKERS, LINKS)
    return [job for job in jobs if job.is_baseline or not args.quick or job.workers == 2]


def results_of(jobs: list[Job], args: Args) -> dict[str, Any]:
    """Measure, and return what is stored: the machine, the setting, and a row for each cell of the table."""
    machine = this_machine()
    if table_pages.is_loaded(machine):
        print(
            f"The load of this machine is {machine['load']:.1f}: the times will be too long.", file=sys.stderr
        )
    runs = 1 if args.quick else args.runs
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=runs * len(jobs))
        found = measure(jobs, runs, args.steps, lambda job: bar.advance(task))
    baselines = {
        job.technique: mean(figures, "tokens_per_second") for job, figures in found.items() if job.is_baseline
    }
    config = GPTConfig.named(SIZE)
    setting = {
        "size": SIZE,
        "parameters": numel(GPT(config)),
        "experts": {
            "number": MOE.num_experts,
            "top_k": MOE.top_k,
            "parameters": numel_with_experts(config),
        },
        "batch_size": BATCH_SIZE,
        "block_size": config.block_size,
        "steps": args.steps,
        "timed_steps": args.steps - min(WARMUP_STEPS, args.steps // 2),
        "runs": runs,
    }
    rows = [row_of(job, figures, baselines, args.steps) for job, figures in found.items()]
    return {"benchmark": "table", "machine": machine, "setting": setting, "rows": rows}


def numel(module: torch.nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def numel_with_experts(config: GPTConfig) -> int:
    """Return the number of parameters of a GPT in which a router and experts replace each block's MLP."""
    mlp, router = numel(make_expert(config, 0, 0, 0)), numel(Router(config.width, MOE.num_experts, MOE.top_k))
    return numel(GPT(config)) + config.num_layers * ((MOE.num_experts - 1) * mlp + router)


def row_of(
    job: Job, figures: list[dict[str, Any]], baselines: dict[Technique, float], steps: int
) -> dict[str, Any]:
    """Return a row as all benchmarks have it, with the figures of each run and the plans of the planner.

    `baselines` has the tokens per second of vanilla, and of techniques that are compared with themselves.
    """
    ours = mean(figures, "tokens_per_second")
    is_own = job.technique.is_other_model
    against = f"{job.technique.name} with 1 worker" if is_own else VANILLA.name
    theirs = baselines[job.technique if is_own else VANILLA]
    names = [name for name in figures[0] if name != "plan"]
    return row(
        job.technique.name, against, job.link, ours, theirs, world_size=job.workers, unit="tokens/s"
    ) | {
        "run_mode": job.technique.run_mode,
        "command": job.command(steps),
        "runs": {name: [one[name] for one in figures] for name in names},
        "plans": [plan_in_words(one["plan"]) for one in figures if job.technique.run_mode == "hybrid"],
    }


def plan_in_words(axes: dict[str, Any]) -> str:
    """Return the sizes that the planner has chosen."""
    words = [f"{axes[f'axis_{axis}']} ({axis})" for axis in ("pipeline", "data", "tensor")]
    more = [f"ZeRO {axes['axis_zero']}"] if axes["axis_zero"] else []
    more += ["sequence parallel"] if axes["axis_sequence_parallel"] else []
    if axes["axis_pipeline"] > 1:
        more.append(f"{axes['axis_schedule']} with {axes['axis_microbatches']} microbatches")
    more += ["recomputation"] if axes["axis_recompute"] else []
    return " and ".join([" x ".join(words), *more])


def mean(figures: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(one[name] for one in figures)


def this_machine() -> dict[str, Any]:
    """Return what the READMEs say about the machine."""
    return {
        "cpu": cpu_name(),
        "cores": len(own_cores()),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "load": os.getloadavg()[0],
    }


def cpu_name() -> str:
    """Return the name of the processor: on Linux its model, elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def show(results: dict[str, Any]) -> None:
    """Print the rows as a table."""
    table = Table(
        "technique", "workers", "link", title="mean and standard deviation; bytes are those of a rank"
    )
    columns = ("tokens/s", "speed-up", "step", "memory", "sent")
    for column in columns:
        table.add_column(column, justify="right")
    for one in results["rows"]:
        table.add_row(one["what"], str(one["world_size"]), one["link"], *table_pages.figures(one))
    Console().print(table)


def read(path: Path) -> dict[str, Any]:
    """Return stored results. Raise WorkbookError if the file has none."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkbookError(f"{path} cannot be read as stored results ({reason(error)}).") from error
    if not isinstance(results, dict) or results.get("benchmark") != "table":
        raise WorkbookError(f"{path} has no results of benchmarks/table.py.")
    return results


def write(results: dict[str, Any]) -> None:
    """Store the results, and write READMEs and pictures."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(as_text(results))
    table_plots.draw(results, RESULTS.parent)
    table_pages.write_pages(results)


def as_text(results: dict[str, Any]) -> str:
    """Return the results as JSON in which every row has a line."""
    text = json.dumps(results | {"rows": []}, indent=1)
    rows = ",\n  ".join(map(json.dumps, results["rows"]))
    return text.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n"


def refuse_stale(results: dict[str, Any] | None) -> None:
    """Raise WorkbookError if a page or picture shows something else than the stored results."""
    stale = table_pages.stale_pages(results)
    for name in table_pages.PICTURES:
        drawn = table_plots.drawn_from(RESULTS.parent / name)
        if drawn != (results and table_plots.digest(results)):
            stale.append(RESULTS.parent / name)
    if stale:
        names = ", ".join(str(path.relative_to(table_pages.ROOT)) for path in stale)
        raise WorkbookError(
            f"{names}: not from the stored results; run benchmarks/table.py --from {RESULTS}."
        )


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except WorkbookError as error:
        sys.exit(str(error))
