"""Compare three ways to go on after a rank has died, by the seconds that are lost.

    python benchmarks/elastic.py                # 4 ranks; a table; about 2 minutes on 2 cores
    python benchmarks/elastic.py --json

      killed ── noticed ── met ──────── restored ── steps repeated ── the step in which the rank died, done
             detection   rendezvous   state

      torchrun     all ranks end, and start again with the last checkpoint (train_hybrid.py)
      mesh         the others form a smaller group, with the last checkpoint (train_elastic_mesh.py)
      survivors    the others form a smaller group in the same processes (train_elastic.py)

`lost` is the time from the kill to the end of the step in which the rank died, less the time of a step. Of
the steps between two checkpoints half are repeated, as on average. Times are those of the slowest rank, and
medians over `--runs` runs.

This file is also the script of the ranks: it trains as the lesson's script does, kills rank 1 in the middle,
and notes when each thing happens. The variable ELASTIC_WAY says that it is a rank.
"""

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import side_by_side
from benchmarks.side_by_side import row, show
from comm.errors import CommError
from comm.membership.survivors import Survivors
from comm.script import start as start_rank
from hybrid_parallel import train_hybrid
from hybrid_parallel.arguments import HybridArgs
from hybrid_parallel.elastic import train_elastic, train_elastic_mesh
from hybrid_parallel.elastic.train_elastic import ElasticArgs, ElasticReplica
from hybrid_parallel.elastic.train_elastic_mesh import ElasticMeshArgs
from lab.cluster import Cluster
from lab.launch.usage import read_words
from training.checkpoint import Checkpoints, complete_steps
from training.run import Run

ROOT = Path(__file__).resolve().parent.parent
KILL_AT, EVERY = 15, 10  # steps: half of the steps between two checkpoints is lost
STEPS = KILL_AT + 5
EVENTS, WAY = "ELASTIC_EVENTS", "ELASTIC_WAY"  # variables with the name of the file, and the way to go on
PHASES = ("detection", "rendezvous", "state", "repeated", "lost")


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare the ways to go on after a death, by the seconds that are lost."""

    ranks: int = 4
    """Number of ranks before the death."""
    runs: int = 3
    """Number of runs of each way; they take turns."""
    size: str = "small"
    """Size of the GPT (lab/models/model.py)."""


def note(event: str, step: int = -1) -> None:
    """Write an event and the time to the file of events; lines of several processes do not mix."""
    with open(os.environ[EVENTS], "a") as file:
        file.write(json.dumps({"event": event, "step": step, "time": time.time()}) + "\n")


def die() -> None:
    note("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def noting(owner: type, name: str, before: Callable | None = None, after: Callable | None = None) -> None:
    """Replace a method by one that calls `before` and `after` around it, with the same arguments."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, replaced)


def watch(rank: int, folder: Path | None, kill: bool) -> None:
    """Note what a rank of any way does; with `kill` let rank 1 die where its last checkpoint is old."""

    def before_batch(run: Run, step: int) -> None:
        if kill and rank == 1 and step == KILL_AT:
            while not complete_steps(Path(str(folder))):
                time.sleep(0.01)
            die()

    noting(Run, "batch", before=before_batch)
    noting(Run, "save_if_due", before=lambda run, step: note(f"step {rank}", step))
    noting(Checkpoints, "load", after=lambda *_: note(f"restored {rank}"))
    noting(Survivors, "regroup", lambda *_: note(f"noticed {rank}"), lambda *_: note(f"met {rank}"))


def restart(cluster: Cluster, args: HybridArgs) -> None:
    """Train as train_hybrid.py does; torchrun starts the ranks again."""
    note(f"met {cluster.rank}")
    has_died = '"killed"' in Path(os.environ[EVENTS]).read_text()  # in an earlier attempt
    watch(cluster.rank, args.checkpoint, kill=not has_died)
    try:
        train_hybrid.main(cluster, args)
    except CommError:
        note(f"noticed {cluster.rank}")
        raise


def survive_on_a_mesh(cluster: Cluster, args: ElasticMeshArgs) -> None:
    """Train as train_elastic_mesh.py does."""
    watch(cluster.rank, args.checkpoint, kill=True)
    train_elastic_mesh.main(cluster, args)


def survive(cluster: Cluster, args: ElasticArgs) -> None:
    """Train as train_elastic.py does."""
    rank = cluster.rank

    def before_step(replica: ElasticReplica, *_: Any) -> None:
        if rank == 1 and replica.steps == KILL_AT:
            die()

    def after_step(replica: ElasticReplica, *_: Any) -> None:
        note(f"step {rank}", replica.steps - 1)

    watch(rank, None, kill=False)
    noting(ElasticReplica, "step", before_step, after_step)
    noting(ElasticReplica, "catch_up", after=lambda *_: note(f"restored {rank}"))
    train_elastic.main(cluster, args)


def be_a_rank() -> None:
    """Train as a rank that `one_run` has started."""
    if os.environ[WAY] == "survivors":
        start_rank(survive, ElasticArgs, in_a_child=True)
    elif os.environ[WAY] == "mesh":
        start_rank(survive_on_a_mesh, ElasticMeshArgs, in_a_child=True)
    else:
        start_rank(restart, HybridArgs, read=lambda words, _: read_words(words, HybridArgs))


def one_run(way: str, args: Args) -> dict[str, float]:
    """Train, kill a rank, and return the seconds of each phase."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(STEPS), "--size", args.size, "--json"]
        if way != "survivors":
            options += ["--layers", "4", "--checkpoint", f"{folder}/run", "--checkpoint-every", str(EVERY)]
            options += [] if way == "mesh" else ["--auto-resume"]
        variables = {EVENTS: f"{folder}/events", WAY: way, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        launch = ["-m", "lab.launch.torchrun", f"--nproc-per-node={args.ranks}", "--max-restarts=1"]
        words, env = [sys.executable, *launch, __file__, *options], os.environ | variables
        done = subprocess.run(words, env=env, capture_output=True, timeout=200, text=True)
        if done.returncode:
            raise SystemExit(f"{way} ended with exit code {done.returncode}:\n{done.stderr}")
        events = (Path(folder) / "events").read_text().splitlines()
        return phases([json.loads(line) for line in events])


def phases(events: list[dict[str, Any]]) -> dict[str, float]:
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
    ends = (killed, noticed, met, restored, done - a_step)
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    return dict(zip(PHASES, [*seconds, sum(seconds)], strict=True))


def main(args: Args) -> None:
    if args.quick:
        args = dataclasses.replace(args, ranks=2, runs=1, size="tiny")
    ways = ["torchrun", "mesh", "survivors"]
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.runs):
        for way, found in runs.items():
            found.append(one_run(way, args))
    median = {way: {one: statistics.median(run[one] for run in runs[way]) for one in PHASES} for way in ways}
    rows = [
        row(f"{way} {phase}", "survivors", median[way][phase], median["survivors"][phase], args.ranks)
        for way in ways[:-1]
        for phase in PHASES
    ]
    show("elastic", rows, args, "one of them dies, against survivors that are replicas")


if __name__ == "__main__":
    be_a_rank() if WAY in os.environ else side_by_side.start(__file__, with_torch=False)
