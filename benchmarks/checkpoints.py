"""Measure what checkpoints cost that are written while training goes on.

    python benchmarks/checkpoints.py            a table; --json for one JSON line
    python benchmarks/checkpoints.py --quick    data parallelism only, and fewer runs
    python benchmarks/checkpoints.py --every 5  another number of steps between two checkpoints

2 ranks train a GPT of 12.9 million parameters with AdamW on the hybrid lesson's mesh. A checkpoint has 155
MB. Three variants of the same training take turns in one process group (benchmarks/side_by_side.py), each for
`--every` steps:

    without       no checkpoint
    background    a checkpoint begins after the first step, and is complete at the end of the last one
    waiting       the same, but the second step begins when the checkpoint is complete

The first row compares the seconds of a step, `background` with `without`. The others compare the seconds that
one checkpoint adds with the seconds of a step: their ratio says how many steps a checkpoint costs. On a
machine with 2 cores the ranks compute on both, and writing takes time from them, also in the background.
"""

import dataclasses
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # it is this folder, in which this file would hide a package of the same name

import tyro
from torch.optim import AdamW

from benchmarks import side_by_side
from benchmarks.side_by_side import medians
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import GPT, GPTConfig
from lab.models.text import load_corpus
from lab.ranks import run_ranks
from lab.ranks.forked import preload
from training.checkpoint import Checkpoints

RANKS = 2
CONFIG = GPTConfig.named("13m")
WINDOWS = 4  # windows of text in the batch of a replica
MESHES = {
    "data": ParallelSizes(data=2),
    "pipeline": ParallelSizes(pipeline=2, microbatches=WINDOWS),
}
Rows = list[dict[str, Any]]


@dataclasses.dataclass
class Args:
    """Compare training with and without checkpoints that are written in the background."""

    every: int = 20
    """Number of steps between two checkpoints."""
    quick: bool = False
    """Measure data parallelism only, with fewer runs."""
    folder: Path | None = None
    """Folder on the disk to write to. None: the system's folder for temporary files."""
    json: bool = False
    """Print one JSON line instead of a table."""


class Training:
    """Trains a model on a mesh, and saves it in `folder`."""

    def __init__(self, cluster: Cluster, sizes: ParallelSizes, folder: str, every: int) -> None:
        tokens = load_corpus()[: WINDOWS * (CONFIG.block_size + 1)].long().view(WINDOWS, -1)
        self._x, self._y = tokens[:, :-1], tokens[:, 1:]
        example = self._x[: WINDOWS // sizes.microbatches]
        self._hybrid = HybridParallel(GPT(CONFIG), Mesh(cluster, sizes), example, AdamW, lr=1e-3)
        self._checkpoints = Checkpoints(folder, cluster, keep=1)
        self._every, self._steps = every, 0

    def step(self) -> None:
        self._hybrid.optimizer.zero_grad()
        self._hybrid.backward(self._x, self._y)
        self._hybrid.optimizer.step()
        self._steps += 1

    def without(self) -> None:
        for _ in range(self._every):
            self.step()

    def background(self, wait: bool = False) -> None:
        self.step()
        hybrid = self._hybrid
        self._checkpoints.save(self._steps, hybrid.shards(hybrid.optimizer))
        if wait:
            self._checkpoints.wait()
        for _ in range(self._every - 1):
            self.step()
        self._checkpoints.wait()


def alternate(
    cluster: Cluster, sizes: ParallelSizes, folder: str, every: int, runs: int
) -> dict[str, list[float]]:
    """Return the seconds of each run of each variant on this rank."""
    training = Training(cluster, sizes, folder, every)
    variants = {
        "without": training.without,
        "background": training.background,
        "waiting": functools.partial(training.background, wait=True),
    }
    return side_by_side.alternate(variants, runs, warmup=1)


def measure(args: Args, folder: Path) -> Rows:
    """Return the rows of each mesh."""
    rows: Rows = []
    for mesh in ["data"] if args.quick else MESHES:
        where, runs = str(folder / mesh), 2 if args.quick else 3
        by_rank = run_ranks(alternate, RANKS, MESHES[mesh], where, args.every, runs, timeout=1800)
        seconds = {name: value / args.every for name, value in medians(by_rank).items()}
        row = functools.partial(side_by_side.row, link="loopback", world_size=RANKS)
        step = seconds["without"]
        what = f"{mesh}, a checkpoint every {args.every} steps"
        rows.append(row(what, "without", ours=seconds["background"], theirs=step))
        for variant in ("background", "waiting"):
            added = args.every * (seconds[variant] - step)
            rows.append(row(f"{mesh}, one checkpoint, {variant}", "one step", ours=added, theirs=step))
    return rows


def main(args: Args) -> None:
    if args.every < 1:
        raise SystemExit(f"--every {args.every}: there is at least 1 step between two checkpoints.")
    preload("hybrid_parallel.train_hybrid")  # ranks are forked, so they start with all modules imported
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args, Path(folder))
    side_by_side.show("checkpoints", rows, args.json, f"{RANKS} ranks, GPT of 12.9 M parameters, AdamW")


if __name__ == "__main__":
    main(tyro.cli(Args))
