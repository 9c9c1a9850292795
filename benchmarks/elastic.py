"""Compare four ways to go on after a rank has died, by the seconds that are lost.

    python benchmarks/elastic.py                # 4 ranks; a table; about 4 minutes on 2 cores
    python benchmarks/elastic.py --json

      killed ── noticed ── met ──────── restored ── steps repeated ── the step in which the rank died, done
             detection   rendezvous   state

      torchrun     all ranks end, and start again with the last checkpoint (train_hybrid.py)
      containers   the engine starts all nodes again, with the last checkpoint (elastic_containers.py)
      mesh         the others form a smaller group, with the last checkpoint (train_elastic_mesh.py)
      survivors    the others form a smaller group in the same processes (train_elastic.py)

`lost` is the time from the kill to the end of the step in which the rank died, less the time of a step. Of
the steps between two checkpoints half are repeated, as on average. Times are those of the slowest rank; the
table has medians over `--runs` runs, and the spread from the lowest to the highest. Without a Docker engine
the containers are left out.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which other benchmarks would hide the lessons' packages

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import elastic_containers
from benchmarks.elastic_steps import EVENTS, EVERY, KILL_AT, WAY
from benchmarks.side_by_side import row

ROOT = Path(__file__).resolve().parent.parent
STEPS = KILL_AT + 5
PHASES = ("detection", "rendezvous", "state", "repeated", "lost")


@dataclasses.dataclass
class Args:
    """Compare the ways to go on after a death, by the seconds that are lost."""

    ranks: int = 4
    """Number of ranks before the death."""
    runs: int = 3
    """Number of runs of each way; they take turns."""
    size: str = "small"
    """Size of the GPT (lab/models/model.py)."""
    quick: bool = False
    """Run each way once, with 2 ranks and a tiny model."""
    json: bool = False
    """Print one line of JSON instead of a table."""


def one_run(way: str, args: Args) -> dict[str, float]:
    """Train, kill a rank, and return the seconds of each phase, and of a step."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(STEPS), "--size", args.size, "--json"]
        shared = elastic_containers.SHARED if way == "containers" else folder
        if way != "survivors":
            options += ["--layers", "4", "--checkpoint", f"{shared}/run", "--checkpoint-every", str(EVERY)]
            options += [] if way == "mesh" else ["--auto-resume"]
        variables = {EVENTS: f"{shared}/events", WAY: way, "OMP_NUM_THREADS": "1"}
        if way == "containers":
            elastic_containers.train(args.ranks, options, variables, Path(folder))
        else:
            _train_here(args.ranks, options, variables)
        events = (Path(folder) / "events").read_text().splitlines()
        return phases([json.loads(line) for line in events], args.ranks)


def _train_here(ranks: int, options: list[str], variables: dict[str, str]) -> None:
    launch = [sys.executable, "-m", "lab.launch.torchrun", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    script = str(Path(__file__).with_name("elastic_steps.py"))
    # The last variable keeps the script's folder from sys.path.
    env = os.environ | variables | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([*launch, script, *options], env=env, capture_output=True, timeout=200, text=True)
    if done.returncode:
        raise SystemExit(f"{variables[WAY]} ended with exit code {done.returncode}:\n{done.stderr}")


def phases(events: list[dict[str, Any]], ranks: int) -> dict[str, float]:
    """Return the seconds of each phase, from what the ranks have noted."""
    [killed] = [one["time"] for one in events if one["event"] == "killed"]

    def last(event: str, step: int = -1) -> float:
        """Return the time at which the last rank has noted the first such event after the death."""
        firsts: dict[str, float] = {}
        for one in events:
            name, _, rank = one["event"].partition(" ")
            if name == event and one["step"] == step and one["time"] > killed:
                firsts.setdefault(rank, one["time"])
        return max(firsts.values())

    steps = [one["time"] for one in events if one["event"] == "step 0" and one["time"] < killed]
    a_step = statistics.median(later - earlier for earlier, later in pairwise(steps))
    noticed, met, restored, done = last("noticed"), last("met"), last("restored"), last("step", KILL_AT)
    return {
        "detection": noticed - killed,
        "rendezvous": met - noticed,
        "state": restored - met,
        "repeated": done - restored - a_step,
        "lost": done - killed - a_step,
        "step": a_step,
    }


def main(args: Args) -> None:
    if args.quick:
        args = dataclasses.replace(args, ranks=2, runs=1, size="tiny")
    ways = ["torchrun", "containers", "mesh", "survivors"]
    if not elastic_containers.engine_answers():
        print("No Docker engine answers, so there is no row for containers.", file=sys.stderr)
        ways.remove("containers")
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with elastic_containers.image() if "containers" in ways else contextlib.nullcontext():
        for _ in range(args.runs):
            for way, found in runs.items():
                found.append(one_run(way, args))
    if args.json:
        print(json.dumps({"benchmark": "elastic", "rows": list(rows_of(runs, args.ranks))}))
    else:
        show(runs, args.ranks)


def median(found: list[dict[str, float]], phase: str) -> float:
    return statistics.median(run[phase] for run in found)


def rows_of(runs: dict[str, list[dict[str, float]]], ranks: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase of each way, beside that of the survivors."""
    for way, phase in itertools.product(runs.keys() - {"survivors"}, PHASES):
        ours, theirs = median(runs[way], phase), median(runs["survivors"], phase)
        place = (f"{way} {phase}", "survivors", "loopback")
        yield row(*place, ours, theirs, world_size=ranks, unit="s")


def show(runs: dict[str, list[dict[str, float]]], ranks: int) -> None:
    """Print the medians, and the spread where there are several runs."""
    table = Table("seconds", *runs, title=f"{ranks} ranks, one of them dies")
    for phase in PHASES:
        cells = []
        for found in runs.values():
            values = [run[phase] for run in found]
            spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
            cells.append(f"{median(found, phase):.2f}{spread}")
        table.add_row(phase, *cells)
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
