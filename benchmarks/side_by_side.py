"""Provide what benchmarks share: variants that take turns, medians, rows, and the final table or JSON line.

    seconds = alternate({"ours": our_step, "theirs": their_step}, runs=7)       # on every rank
    median = medians(run_ranks(...))                                            # over all ranks
    rows = [row("bucket_overlap", "ddp", "1gbit", median["ours"], median["theirs"], world_size=2)]
    show("data_parallel", rows, as_json=args.json, title="2 ranks")

Variants share one process group and alternate, so other load on the machine slows all of them. The time of a
run is that of its slowest rank. A ratio is ours / theirs of the medians: below 1, ours is faster or smaller.
Scripts that compare with torch call `leave_gloo_as_it_is` first.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from comm import collectives
from comm.cost import Link
from comm.wire import slow_link
from lab.units import KIB, MIB


def leave_gloo_as_it_is() -> None:
    """Leave gloo's threads as PyTorch starts them (lab/launch/gloo_threads.py), unless GLOO_SCHED is set.

    Call it before the first ranks start, which inherit the setting.
    """
    os.environ.setdefault("GLOO_SCHED", "other")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of the call on this rank, after a barrier of all ranks."""
    collectives.barrier(pattern="torch")
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(
    variants: Mapping[str, Callable[[], object]], runs: int, link: Link | None = None, warmup: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each run of each variant on this rank; `warmup` runs on loopback do not count."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in range(warmup + runs):
        for i in range(len(names)):
            # The order rotates, because a variant finds the caches as the variant before it has left them.
            name = names[(i + run) % len(names)]
            # DDP and ours rebuild their buckets in the first steps, which need no slow link.
            with slow_link.slowed(link if run >= warmup else None):
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
    link: str,
    ours: float,
    theirs: float,
    *,
    world_size: int,
    unit: str = "s",
    num_bytes: int | None = None,
) -> dict[str, Any]:
    """Return one comparison, as `show` takes it; `num_bytes` is given if the size varies between rows."""
    place: dict[str, Any] = {"what": what, "against": against, "link": link, "world_size": world_size}
    size = {} if num_bytes is None else {"bytes": num_bytes}
    return place | size | {"ours": ours, "theirs": theirs, "unit": unit, "ratio": ours / theirs}


def show(benchmark: str, rows: list[dict[str, Any]], as_json: bool, title: str) -> None:
    """Print the rows as a table, or as one JSON line."""
    if as_json:
        print(json.dumps({"benchmark": benchmark, "rows": rows}))
        return
    # A column that is equal in all rows is left out: the title says it.
    places = [key for key in ("against", "link", "bytes") if len({one.get(key) for one in rows}) > 1]
    table = Table("what", *places, title=title)
    for column in ("ours", "theirs", "ratio"):
        table.add_column(column, justify="right")
    for one in rows:
        place = (_size(one.get(key)) if key == "bytes" else one[key] for key in places)
        sides = (_readable(one[side], one["unit"]) for side in ("ours", "theirs"))
        table.add_row(one["what"], *place, *sides, f"{one['ratio']:.2f}")
    Console().print(table)


def _readable(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / MIB:.1f} MiB"
    return f"{value * 1e3:.{1 if value >= 0.01 else 3}f} ms" if unit == "s" else f"{value:.4g} {unit}"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    if num_bytes < KIB:
        return f"{num_bytes} bytes"
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
