"""Measure every technique in the same training, and write the tables and pictures of the pages.

    python benchmarks/table.py                      30 minutes: writes results/, pages and pictures
    python benchmarks/table.py --quick              few rows, 2 workers, 1 run: prints a table, writes nothing
    python benchmarks/table.py --only zero-3 1f1b   these techniques only: prints a table, writes nothing
    python benchmarks/table.py --from FILE          writes pages and pictures from stored results

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
import re
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from benchmarks import side_by_side
from benchmarks.side_by_side import row
from benchmarks.table_pages import RESULTS, write
from benchmarks.table_runs import (
    BATCH_SIZE,
    EXPERTS,
    LINKS,
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
from hybrid_parallel.mesh import AXES
from hybrid_parallel.planner.table import describe
from hybrid_parallel.sizes import ParallelSizes
from lab.launch.errors import WorkbookError, reason
from lab.launch.threads import own_cores
from lab.models.model import GPT, GPTConfig
from training.report import WARMUP_STEPS


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Measure every technique in the same training, and write the tables and pictures of the pages."""

    only: tuple[str, ...] = ()
    """Names of techniques to measure beside vanilla, such as zero-3 or 1f1b; then write nothing."""
    runs: int = RUNS
    """Number of runs of each row."""
    steps: int = STEPS
    """Number of steps of a run; the first two are not timed."""
    stored: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """File with stored results: write the READMEs and pictures from it, and measure nothing."""


def main(args: Args) -> None:
    if args.stored is not None:
        write(read(args.stored))
        return
    results = results_of(chosen(args), args)
    others = {name: results[name] for name in ("machine", "setting")}
    side_by_side.show("table", results["rows"], args, "tokens per second, and those of one process", **others)
    if not (args.quick or args.only):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(as_text(results))
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
    machine, config, runs = this_machine(), GPTConfig.named(SIZE), 1 if args.quick else args.runs
    found = measure(jobs, runs, args.steps)
    baselines = {job.technique: mean_tokens(figures) for job, figures in found.items() if job.is_baseline}
    setting = {
        "size": SIZE,
        "parameters": sum(parameter.numel() for parameter in GPT(config).parameters()),
        "batch_size": BATCH_SIZE,
        "block_size": config.block_size,
        "timed_steps": args.steps - min(WARMUP_STEPS, args.steps // 2),
        "runs": runs,
    }
    rows = [row_of(job, figures, baselines, args.steps) for job, figures in found.items()]
    return {"benchmark": "table", "machine": machine, "setting": setting, "rows": rows}


def mean_tokens(figures: list[dict[str, Any]]) -> float:
    return statistics.mean(one["tokens_per_second"] for one in figures)


def row_of(
    job: Job, figures: list[dict[str, Any]], baselines: dict[Technique, float], steps: int
) -> dict[str, Any]:
    """Return a row as all benchmarks have it, with the figures of each run and the plans of the planner.

    `baselines` has the tokens per second of vanilla, and of experts with 1 worker.
    """
    technique, is_own = job.technique, job.technique == EXPERTS
    against = f"{technique.name} with 1 worker" if is_own else VANILLA.name
    sides = mean_tokens(figures), baselines[EXPERTS if is_own else VANILLA]
    names = [name for name in figures[0] if name != "plan"]
    return row(technique.name, against, *sides, job.workers, job.link, "tokens/s") | {
        "run_mode": technique.run_mode,
        "command": job.command(steps),
        "runs": {name: [one[name] for one in figures] for name in names},
        "plans": [plan_in_words(one["plan"]) for one in figures if technique.run_mode == "hybrid"],
    }


def plan_in_words(report: dict[str, Any]) -> str:
    """Return the sizes that the planner has chosen."""
    names = [field.name for field in dataclasses.fields(ParallelSizes)]
    sizes = ParallelSizes(**{name: report[f"axis_{name}"] for name in names})
    return " x ".join(f"{getattr(sizes, axis)} ({axis})" for axis in AXES) + f", {describe(sizes)}"


def this_machine() -> dict[str, Any]:
    """Return what the READMEs say about the machine."""
    load, cpuinfo = os.getloadavg()[0], Path("/proc/cpuinfo")
    if load > 0.5:
        print(f"The load of this machine is {load:.1f}: the times will be too long.", file=sys.stderr)
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "cpu": name[1] if name else platform.machine(),
        "cores": len(own_cores()),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "load": load,
    }


def read(path: Path) -> dict[str, Any]:
    """Return stored results. Raise WorkbookError if the file has none."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkbookError(f"{path} cannot be read as stored results ({reason(error)}).") from error
    if results.get("benchmark") != "table":
        raise WorkbookError(f"{path} has no results of benchmarks/table.py.")
    return results


def as_text(results: dict[str, Any]) -> str:
    """Return the results as JSON in which every row has a line."""
    text = json.dumps(results | {"rows": []}, indent=1)
    rows = ",\n  ".join(map(json.dumps, results["rows"]))
    return text.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n"


if __name__ == "__main__":
    side_by_side.start(__file__, with_torch=False)
