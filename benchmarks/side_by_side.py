"""Provide what benchmarks share: a script's start, variants that take turns, medians, and the final table.

    class Args(side_by_side.Args): ...                                          # --quick and --json, and more
    seconds = alternate({"ours": our_step, "theirs": their_step}, runs=7)       # on every rank
    median = medians(run_ranks(...))                                            # over all ranks
    rows = [row("bucket_overlap", "ddp", median["ours"], median["theirs"], ranks=2, link="1gbit")]
    show("data_parallel", rows, args, title="GPT of 12.9 M parameters")         # at the end of `main(args)`
    side_by_side.start(__file__)                                                # as the script's last line

Variants share one process group and alternate, so other load on the machine slows all of them. The time of a
run is that of its slowest rank. A ratio is ours / theirs of the medians: below 1, ours is faster or smaller.
Benchmarks train on tokens by chance, because a step takes equally long on any text.
"""

import copy
import ctypes
import dataclasses
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

# A script's folder is first on the path. There data_parallel.py would hide the package of the same name.
# Scripts import this module before the lessons' packages, because imports are sorted.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from comm import collectives
from comm.wire import slow_link
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig, loss_of
from lab.ranks.forked import preload
from lab.trace import meter
from lab.trace.ledger import LEDGER
from lab.trace.timeline import span
from lab.units import show_bytes, show_seconds

GPT_13M = GPTConfig.named("13m")  # 12.9 million parameters
Batch = tuple[Tensor, Tensor]  # inputs and targets
Rows = list[dict[str, Any]]
Seconds = dict[str, list[float]]  # of each run of each variant
Step = Callable[[], object]


@dataclasses.dataclass
class Args:
    """Provide the options of all benchmarks."""

    quick: bool = False
    """Measure fewer rows, with fewer runs."""
    json: bool = False
    """Print one JSON line instead of tables."""


def start(file: str, with_torch: bool = True) -> None:
    """Run a script's `main(args)` under the script's module name, so that ranks can import its functions.

    The forkserver imports the module before it forks. With `with_torch` gloo's threads stay as PyTorch starts
    them (lab/launch/gloo_threads.py), unless GLOO_SCHED is set; ranks inherit the setting.
    """
    if with_torch:
        os.environ.setdefault("GLOO_SCHED", "other")
    name = f"benchmarks.{Path(file).stem}"
    preload(name)
    main = importlib.import_module(name).main
    try:
        main(tyro.cli(get_type_hints(main)["args"]))
    except WorkbookError as error:
        sys.exit(str(error))


def tokens(config: GPTConfig, windows: int) -> Batch:
    """Return inputs and targets of so many windows."""
    random = torch.randint(256, (windows, config.block_size + 1), generator=torch.Generator().manual_seed(1))
    return random[:, :-1].contiguous(), random[:, 1:].contiguous()


def new_gpt(config: GPTConfig) -> GPT:
    """Return a GPT, always with the same initial weights."""
    return copy.deepcopy(_gpt_as_made(config))


@functools.cache
def _gpt_as_made(config: GPTConfig) -> GPT:
    return GPT(config)  # copying it is faster than making it again


@dataclasses.dataclass
class Training:
    """Trains on the same batch in every step. Without an optimizer a step ends with the gradients."""

    model: nn.Module
    optimizer: Optimizer | None
    batch: Batch

    def __call__(self) -> Tensor:
        x, y = self.batch
        (self.optimizer or self.model).zero_grad()
        with span("forward", "forward"):
            loss = getattr(self.model, "loss", loss_of)(self.model(x), y)
        with span("backward", "backward"):
            loss.backward()
        for owner in (self.model, self.optimizer):  # torch's have nothing to finish
            getattr(owner, "finish_gradient_sync", lambda: None)()
        if self.optimizer is not None:
            with span("step", "optimizer"):
                self.optimizer.step()
        return loss.detach()


def bytes_sent_in(step: Step) -> int:
    """Return the bytes that this rank sends in the step."""
    before = LEDGER.total()
    step()
    return (LEDGER.total() - before).bytes_sent


def unmap_freed_memory() -> None:
    """Let glibc return freed memory at once. What it keeps would hide what a step needs."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: a larger block is a mapping of its own


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB again, as it does by default where these are used often."""
    for option, size in ((-3, 32 << 20), (-1, 64 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        ctypes.CDLL(None).mallopt(option, size)


def peak_of_a_step(cluster: Cluster, build: Callable[[], Step]) -> tuple[int, int]:
    """Return this process's peak memory in the third step, and its memory before `build` made the step.

    Optimizer state and buckets exist after the first steps.
    """
    unmap_freed_memory()
    meter.reset_peak_memory(cluster.device)
    before = meter.peak_memory(cluster.device)
    step = build()
    _gpt_as_made.cache_clear()  # else there would be a second model
    for _ in range(2):
        step()
    meter.reset_peak_memory(cluster.device)
    step()
    return meter.peak_memory(cluster.device), before


def timed(call: Step) -> float:
    """Return the seconds of the call on this rank, after a barrier of all ranks."""
    collectives.barrier(pattern="torch")
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(variants: Mapping[str, Step], runs: int, link: str = "loopback", warmup: int = 2) -> Seconds:
    """Return the seconds of each run of each variant on this rank; `warmup` runs on loopback do not count."""
    names, slow = list(variants), None if link == "loopback" else slow_link.parse(link)
    seconds: Seconds = {name: [] for name in names}
    for run in range(warmup + runs):
        for i in range(len(names)):
            # The order rotates, because a variant finds the caches as the variant before it has left them.
            name = names[(i + run) % len(names)]
            # DDP and ours rebuild their buckets in the first steps, which need no slow link.
            with slow_link.slowed(slow if run >= warmup else None):
                seconds[name].append(timed(variants[name]))
    return {name: times[warmup:] for name, times in seconds.items()}


def median_of_slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Return the median over runs of the slowest rank's seconds."""
    return statistics.median(map(max, zip(*by_rank, strict=True)))


def medians(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return `median_of_slowest` of each variant, from the results of `alternate` on all ranks."""
    return {name: median_of_slowest([rank[name] for rank in by_rank]) for name in by_rank[0]}


def row(
    what: str,
    against: str,
    ours: float,
    theirs: float,
    ranks: int,
    link: str = "loopback",
    unit: str = "s",
    num_bytes: int | None = None,
) -> dict[str, Any]:
    """Return one comparison, as `show` takes it; `num_bytes` is given if the size varies between rows."""
    place: dict[str, Any] = {"what": what, "against": against, "link": link, "world_size": ranks}
    size = {} if num_bytes is None else {"bytes": num_bytes}
    return place | size | {"ours": ours, "theirs": theirs, "unit": unit, "ratio": ours / theirs}


def show(benchmark: str, rows: Rows, args: Args, title: str, **more: Any) -> None:
    """Print the rows as a table for each world size, or as one JSON line, which has `more`, too."""
    if args.json:
        print(json.dumps({"benchmark": benchmark, "rows": rows} | more))
        return
    for size in sorted({one["world_size"] for one in rows}):
        ranks = f"{size} rank{'s' * (size > 1)}"
        _print_table([one for one in rows if one["world_size"] == size], f"{ranks}, {title}")


def _print_table(rows: Rows, title: str) -> None:
    # A column that is equal in all rows is left out: the title says it.
    places = [key for key in ("against", "link", "bytes") if len({one.get(key) for one in rows}) > 1]
    table = Table("what", *places, title=title)
    for column in ("ours", "theirs", "ratio"):
        table.add_column(column, justify="right")
    for one in rows:
        show = {"s": show_seconds, "bytes": show_bytes}.get(one["unit"], "{:,.0f}".format)
        place = (str(one.get(key, "")) for key in places)
        sides = (show(one[side]) for side in ("ours", "theirs"))
        table.add_row(one.get("label", one["what"]), *place, *sides, f"{one['ratio']:.2f}")
    Console(width=None if sys.stdout.isatty() else 150).print(table)
