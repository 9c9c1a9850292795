"""Measure how long each way to send less takes to the loss that bucket overlap reaches.

    python benchmarks/sending_less.py                        a table, in 90 minutes; --json for one JSON line
    python benchmarks/sending_less.py --quick                one seed, three methods, fewer steps
    python benchmarks/sending_less.py --plot less.png        also loss against seconds, bytes and steps
    python benchmarks/sending_less.py --size 13m --steps 100 --seeds 0
    python benchmarks/sending_less.py --optimizer momentum --lr 0.1 \
        --methods bucket_overlap topk topk-momentum

Four ranks train a GPT on text. All methods begin with a model that bucket overlap has trained for 128 steps.
In the first hundred the loss stands still for a while, and by chance one method gets on sooner than another.

A link does not change what is trained, so each method is trained once for each seed, at the machine's own
speed, until its loss on held-out data is the one of bucket overlap after `--steps` more steps. Then the time
of a step is measured on each link (comm/wire/slow_link.py): the mean over whole rounds of H steps, with all
that a method computes for itself. The product of steps and time is the time to the loss. `--whole 200mbit`
trains the first seed on that link from the first step to the last, to show that the product is right.

A method that does not reach the loss within three times the steps of bucket overlap "never" reaches it.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks import side_by_side
from benchmarks.side_by_side import Rows
from comm.collectives import barrier
from comm.exchange import exchange
from comm.wire import slow_link
from data_parallel.train_bucket_overlap import Bucket, BucketDataParallel
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import rank_slice
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER
from lab.units import show_bytes, show_seconds
from low_communication.train_compressed import CompressedDataParallel
from low_communication.train_diloco import StreamingDiLoCo
from low_communication.train_local_sgd import LocalSGD
from training.arguments import OPTIMIZERS, Size
from training.data import TrainingData, seed_step
from training.evaluation import evaluating, held_out_means, sums_of

RANKS = 4
WARM_UP = 128  # steps before all methods
BATCH = 8  # windows of text in a step, over all ranks: few, so that a step is mostly sending
MOST = 3  # times the steps of bucket overlap
REPEATS = 3  # of the rounds in which the time of a step is measured
LINKS = ("200mbit", "1gbit", "loopback")
CORRECTED = "topk-momentum"
METHODS: dict[str, dict[str, Any]] = {  # the wrapper's options
    "bucket_overlap": {},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "int8-no-feedback": {"compress": "int8", "error_feedback": False},
    "powersgd": {"compress": "powersgd"},
    "powersgd-no-feedback": {"compress": "powersgd", "error_feedback": False},
    "topk": {"compress": "topk"},
    "topk-no-feedback": {"compress": "topk", "error_feedback": False},
    CORRECTED: {"compress": "topk"},
    "local-8": {"sync_every": 8},
    "local-32": {"sync_every": 32},
    "diloco-32": {"sync_every": 32, "outer_lr": 1.0, "outer_momentum": 0.3},
    "diloco-64": {"sync_every": 64, "outer_lr": 1.0, "outer_momentum": 0.3},
    "diloco-32-paper": {"sync_every": 32},
}
DEFAULT = tuple(name for name in METHODS if "feedback" not in name and name != CORRECTED)
QUICK = ("bucket_overlap", "int8", "powersgd", "diloco-32")
Begin = tuple[dict[str, Any], dict[str, Any]]  # states of model and optimizer after the warm-up
Curve = list[tuple[int, float, int]]  # steps, loss on held-out data, bytes that a rank has sent


@dataclasses.dataclass
class Args(side_by_side.Args):
    """Measure the time to a loss of training that sends less."""

    size: Size = "8layers"
    """Size of the GPT (lab/models/model.py)."""
    optimizer: Literal["adamw", "momentum"] = "adamw"
    """Optimizer; momentum is SGD with a momentum of 0.9."""
    lr: float = 1e-3
    """Learning rate of the optimizer."""
    steps: int = 400
    """Number of steps after which the loss of bucket overlap is the one to reach."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and batches. The table has medians over them."""
    methods: tuple[str, ...] = DEFAULT
    """Names of the methods to measure."""
    whole: str | None = None
    """Link on which the first seed is trained as a whole."""
    plot: Path | None = None
    """Draw loss against seconds, bytes and steps into this file."""


class MomentumCorrected(CompressedDataParallel):
    """Compresses each rank's momentum in place of its gradient, for an optimizer without momentum.

    A number that is sent loses its momentum, too. Lin et al., "Deep Gradient Compression", 2018,
    https://arxiv.org/abs/1712.01887, sections 3.1 and 3.2.
    """

    def __init__(self, *how: Any, **options: Any) -> None:
        super().__init__(*how, **options)
        self.momentum: dict[Bucket, torch.Tensor] = {}

    @torch.no_grad()
    def _average(self, bucket: Bucket) -> None:
        momentum = self.momentum.setdefault(bucket, torch.zeros_like(bucket.flat))
        momentum.mul_(0.9).add_(bucket.flat)
        bucket.flat.copy_(momentum)
        super()._average(bucket)
        momentum[self.remaining[bucket] == 0] = 0


class Trainer:
    """Trains a GPT by one method; `round` is the number of steps after which the method repeats itself."""

    def __init__(
        self, cluster: Cluster, method: str, args: "Args", seed: int, begin: Begin | None = None
    ) -> None:
        self.rank, self.ranks, self.seed = cluster.rank, cluster.world_size, seed
        options, optimizer = dict(METHODS[method]), "sgd" if method == CORRECTED else args.optimizer
        config = GPTConfig.named(args.size)
        self.data = TrainingData("gpt", BATCH, seed, config.block_size)
        gpt = GPT(config, seed=seed)
        if begin is not None:
            gpt.load_state_dict(begin[0])
        self.model: Any
        if method == CORRECTED:
            self.model = MomentumCorrected(gpt, **options)
        elif method.startswith("diloco"):
            self.model = StreamingDiLoCo(gpt, **options)
        elif "sync_every" in options:
            self.model = LocalSGD(gpt, **options)
        elif "compress" in options:
            self.model = CompressedDataParallel(gpt, **options)
        else:
            self.model = BucketDataParallel(gpt)
        optimizer_class, settings, _ = OPTIMIZERS[optimizer]
        self.optimizer = optimizer_class(self.model.parameters(), lr=args.lr, **settings)
        if begin is not None and method != CORRECTED:
            self.optimizer.load_state_dict(begin[1])
        self.first = 0 if begin is None else WARM_UP
        self.round, self.steps = options.get("sync_every", 1), 0

    def step(self) -> None:
        step = self.first + self.steps
        seed_step(self.seed, step, self.rank)
        x, y = (rank_slice(part, self.rank, self.ranks) for part in self.data.batch(step))
        self.optimizer.zero_grad()
        loss_of(self.model(x), y).backward()
        if isinstance(self.model, BucketDataParallel):
            self.model.finish_gradient_sync()
        self.optimizer.step()
        if isinstance(self.model, LocalSGD):
            self.model.after_step(self.optimizer)
        elif isinstance(self.model, StreamingDiLoCo):
            self.model.after_step()
        self.steps += 1

    def held_out_loss(self) -> float:
        batches = (
            tuple(rank_slice(part, self.rank, self.ranks) for part in batch) for batch in self.data.held_out()
        )
        with evaluating(self.model), LEDGER.paused(), slow_link.slowed(None):
            tokens, device = self.data.held_out_tokens, torch.device("cpu")
            sums = lambda x, y, counts: sums_of(self.model(x), y, counts)  # noqa: E731
            return held_out_means(batches, sums, tokens, device, "ring")[0]  # type: ignore[arg-type]


def warmed_up(cluster: Cluster, args: Args, seed: int) -> Begin:
    """Return the states of a model and its optimizer after the steps before all methods."""
    trainer = Trainer(cluster, "bucket_overlap", args, seed)
    for _ in range(WARM_UP):
        trainer.step()
    return trainer.model.module.state_dict(), trainer.optimizer.state_dict()


def curve_of(
    cluster: Cluster,
    method: str,
    args: Args,
    seed: int,
    begin: Begin,
    steps: int,
    goal: float | None,
    link: str | None,
) -> tuple[Curve, float]:
    """Train until the loss is `goal`, or for `steps` steps; return the curve and the seconds of steps."""
    slow_link.use(None if link is None else slow_link.parse(link))
    trainer = Trainer(cluster, method, args, seed, begin)
    every = max(trainer.round, 16)
    curve: Curve = []
    before, seconds = LEDGER.total().bytes_sent, 0.0
    while not curve or (curve[-1][0] < steps and (goal is None or curve[-1][1] > goal)):
        start = time.perf_counter()
        for _ in range(every):
            trainer.step()
        seconds += time.perf_counter() - start
        curve.append((trainer.steps, trainer.held_out_loss(), LEDGER.total().bytes_sent - before))
    return curve, seconds


def seconds_of_step(cluster: Cluster, method: str, args: Args, links: list[str]) -> dict[str, float]:
    """Return the seconds of a step on each link: a median of means over rounds, of the slowest rank."""
    trainer, found = Trainer(cluster, method, args, 0), {link: [] for link in links}
    while trainer.steps < 2 or trainer.steps % trainer.round:  # the first steps warm up
        trainer.step()
    number = trainer.round * -(-8 // trainer.round)
    for link in links * REPEATS:
        slow_link.use(None if link == "loopback" else slow_link.parse(link))
        with slow_link.slowed(None):
            barrier()
        start = time.perf_counter()
        for _ in range(number):
            trainer.step()
        found[link].append(max(exchange(time.perf_counter() - start)) / number)
    return {link: statistics.median(seconds) for link, seconds in found.items()}


def steps_to(curve: Curve, goal: float) -> float:
    """Return the number of steps, interpolated, after which the loss is `goal`; infinity if it never is."""
    before: tuple[int, float, int] | None = None
    for now in curve:
        if now[1] <= goal:
            if before is None:
                return now[0]
            return before[0] + (before[1] - goal) / (before[1] - now[1]) * (now[0] - before[0])
        before = now
    return math.inf


def curves_of(args: Args, seed: int, link: str | None = None) -> dict[str, tuple[Curve, float]]:
    """Return the curve of each method, and the seconds of its steps, as far as bucket overlap's loss."""
    found: dict[str, tuple[Curve, float]] = {}
    goal, begin = None, run_ranks(warmed_up, RANKS, args, seed, timeout=3600)[0]
    for method in args.methods:
        steps = args.steps * (1 if goal is None else MOST)
        how = method, args, seed, begin, steps, goal, link
        found[method] = run_ranks(curve_of, RANKS, *how, timeout=7200)[0]
        goal = found["bucket_overlap"][0][-1][1]
        steps_taken = steps_to(found[method][0], goal)
        said = "never" if math.isinf(steps_taken) else f"after {steps_taken:.0f} steps"
        print(f"seed {seed}, {method}: loss {goal:.4f} {said}", file=sys.stderr, flush=True)
    return found


def main(args: Args) -> None:
    if args.methods[:1] != ("bucket_overlap",) or not set(args.methods) <= set(METHODS):
        others = ", ".join(list(METHODS)[1:])
        raise WorkbookError(f"--methods: bucket_overlap comes first, then some of {others}.")
    if CORRECTED in args.methods and args.optimizer != "momentum":
        raise WorkbookError(f"--methods: {CORRECTED} is for --optimizer momentum.")
    if args.quick:
        args = dataclasses.replace(args, steps=64, seeds=args.seeds[:1], methods=QUICK)
    by_seed = [curves_of(args, seed) for seed in args.seeds]
    whole = curves_of(args, args.seeds[0], args.whole) if args.whole else {}
    rows: Rows = []
    for method in args.methods:
        of_step = run_ranks(seconds_of_step, RANKS, method, args, list(LINKS), timeout=3600)[0]
        steps = [steps_to(curves[method][0], curves["bucket_overlap"][0][-1][1]) for curves in by_seed]
        median, last = statistics.median(steps), by_seed[0][method][0][-1]
        seconds = {link: median * of_step[link] for link in LINKS}
        if whole:
            seconds[f"{args.whole}, whole"] = whole[method][1]
        rows.append(
            {"what": method, "steps": median, "bytes": last[2] / last[0], "step": of_step, "seconds": seconds}
        )
    show(rows, args)
    if args.plot is not None:
        draw(by_seed[0], {row["what"]: row["step"] for row in rows}, args.plot)


def show(rows: Rows, args: Args) -> None:
    """Print a row for each method, with its ratios to bucket overlap in parentheses."""
    if args.json:
        print(json.dumps({"benchmark": "sending_less", "rows": rows}))
        return
    first, links = rows[0], list(rows[0]["seconds"])
    table = Table("method", title=f"To the loss of bucket overlap after {args.steps} steps, GPT {args.size}")
    for column in ("steps", "bytes of a step", *links):
        table.add_column(column, justify="right")

    def cell(ours: float, theirs: float, shown: Callable[[float], str]) -> str:
        return "never" if math.isinf(ours) else f"{shown(ours)} ({ours / theirs:.2f})"

    for row in rows:
        sizes = (
            cell(row["steps"], first["steps"], "{:.0f}".format),
            cell(row["bytes"], first["bytes"], show_bytes),
        )
        times = (cell(row["seconds"][link], first["seconds"][link], show_seconds) for link in links)
        table.add_row(row["what"], *sizes, *times)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def draw(curves: dict[str, tuple[Curve, float]], seconds: dict[str, dict[str, float]], path: Path) -> None:
    """Draw loss against steps, bytes, and seconds on the two slow links; dashed if ranks train alone."""
    goal, others = curves["bucket_overlap"][0][-1][1], len(curves) - 1
    links = {"200 Mbit/s": LINKS[0], "1 Gbit/s": LINKS[1]}
    panels: dict[str, Callable[[str], list[float]]] = {
        "steps": lambda method: [steps for steps, _, _ in curves[method][0]],
        "MB that a rank has sent": lambda method: [sent / 1e6 for _, _, sent in curves[method][0]],
    }
    for name, link in links.items():
        panels[f"seconds at {name}"] = lambda method, link=link: [
            steps * seconds[method][link] for steps, _, _ in curves[method][0]
        ]
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    for axes, (name, along) in zip(figure.subplots(1, 4, sharey=True), panels.items(), strict=True):
        ends = {}
        for number, (method, (curve, _)) in enumerate(curves.items()):
            x = along(method)
            ends[method] = x[-1] if curve[-1][1] <= goal else math.inf
            color = "black" if method == "bucket_overlap" else f"C{number}"
            style = "--" if "sync_every" in METHODS[method] else "-"
            axes.plot(x, [loss for _, loss, _ in curve], style, color=color, label=method, linewidth=1.2)
        axes.axhline(goal, color="gray", linewidth=0.8, linestyle=":")
        before = sum(end < ends["bucket_overlap"] for end in ends.values())
        axes.set_title(f"{before} of {others} are there before bucket overlap", fontsize=10)
        axes.set_xlabel(name)
    figure.axes[1].set_xscale("log")
    figure.axes[0].set_ylabel("loss on held-out data")
    figure.axes[-1].legend(fontsize=8)
    figure.suptitle(
        f"From the same start to the loss of the dotted line, one seed, {RANKS} ranks", fontsize=11
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    side_by_side.start(__file__)
