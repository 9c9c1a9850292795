"""Measure what checkpoints cost: a save, its pause, a load, and a save while training continues.

    python benchmarks/checkpoints.py            a table; --json for one JSON line
    python benchmarks/checkpoints.py --quick    data parallelism only, and fewer runs

2 ranks train a GPT of 12.9 million parameters with AdamW on the hybrid lesson's mesh. A checkpoint has 155
MB. Variants of the same training take turns in one process group (benchmarks/side_by_side.py):

    without       20 steps without a checkpoint
    background    a checkpoint begins after the first step, and is complete at the end of the last one
    pause         the call that begins a checkpoint, which copies the state
    save          a checkpoint, with no training meanwhile, until it is complete
    load          the same checkpoint is loaded

The first row compares the seconds of a step, `background` with `without`. The others are compared with the
seconds of one step; `one checkpoint` is what a checkpoint in the background adds. On a machine with 2 cores
the ranks compute on both, and writing takes time from them, also in the background.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path

from benchmarks import side_by_side
from benchmarks.side_by_side import GPT_13M, Rows, Seconds, medians, tokens
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes
from hybrid_parallel.train_hybrid import put_on_mesh
from lab.cluster import Cluster
from lab.models.model import GPT
from lab.ranks import run_ranks
from training.checkpoint import Checkpoints

RANKS = 2
WINDOWS = 4  # windows of text in the batch of a replica
EVERY = 20  # steps between two checkpoints
MESHES = {"data": ParallelSizes(data=2), "pipeline": ParallelSizes(pipeline=2, microbatches=WINDOWS)}


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Compare training with and without checkpoints that are written in the background."""

    folder: Path | None = None
    """Folder on the disk to write to. None: the system's folder for temporary files."""


class Training:
    """Trains a model on a mesh, saves it in `folder`, and loads it."""

    def __init__(self, cluster: Cluster, sizes: ParallelSizes, folder: str) -> None:
        self._x, self._y = tokens(GPT_13M, WINDOWS)
        example = self._x[: WINDOWS // sizes.microbatches]
        self._hybrid = put_on_mesh(GPT(GPT_13M), Mesh(cluster, sizes), example, lr=1e-3)
        self._checkpoints = Checkpoints(folder, cluster, keep=1)
        self._steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._hybrid.optimizer.zero_grad()
            self._hybrid.backward(self._x, self._y)
            self._hybrid.optimizer.step()

    def begin_to_save(self) -> None:
        self._steps += 1
        self._checkpoints.save(self._steps, self._hybrid.state_shards(self._hybrid.optimizer))

    def save(self) -> None:
        self.begin_to_save()
        self._checkpoints.wait()

    def load(self) -> None:
        self._checkpoints.load(self._steps, self._hybrid.state_shards(self._hybrid.optimizer))

    def background(self, steps: int) -> None:
        self.train(1)
        self.begin_to_save()
        self.train(steps - 1)
        self._checkpoints.wait()

    def pauses(self, runs: int) -> list[float]:
        """Return the seconds of each call that begins a checkpoint, without the wait for its end."""
        seconds = []
        for _ in range(runs):
            seconds.append(side_by_side.timed(self.begin_to_save))
            self._checkpoints.wait()
        return seconds


def alternate(cluster: Cluster, sizes: ParallelSizes, folder: str, runs: int) -> Seconds:
    """Return the seconds of each run of each variant on this rank."""
    training = Training(cluster, sizes, folder)
    training.train(2)
    steps = {"without": training.train, "background": training.background}
    calls = {name: functools.partial(call, EVERY) for name, call in steps.items()}
    seconds = side_by_side.alternate(calls, runs, warmup=0)
    seconds |= side_by_side.alternate({"save": training.save, "load": training.load}, max(3, runs), warmup=1)
    return seconds | {"pause": training.pauses(max(3, runs))}


def measure(args: Args, folder: Path) -> Rows:
    """Return the rows of each mesh."""
    rows: Rows = []
    row = functools.partial(side_by_side.row, ranks=RANKS)
    for mesh in ["data"] if args.quick else MESHES:
        arguments = MESHES[mesh], str(folder / mesh), 1 if args.quick else 3
        seconds = medians(run_ranks(alternate, RANKS, *arguments, timeout=1800))
        step, saving = seconds["without"] / EVERY, seconds["background"] / EVERY
        rows.append(row(f"{mesh}, a checkpoint every {EVERY} steps", "without", saving, step))
        rows.append(row(f"{mesh}, one checkpoint", "one step", EVERY * (saving - step), step))
        rows += [
            row(f"{mesh}, {what}", "one step", seconds[what], step) for what in ("save", "load", "pause")
        ]
    return rows


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(args, Path(folder))
    side_by_side.show("checkpoints", rows, args, "GPT of 12.9 M parameters, AdamW")


if __name__ == "__main__":
    side_by_side.start(__file__, with_torch=False)
